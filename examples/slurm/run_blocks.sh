#!/usr/bin/env bash
# Train a capture in blocks on a SLURM cluster: sbatch run_blocks.sh TOWN OUTPUT 9
#
# This job holds no GPU: it cuts the capture, asks the queue for workers as jobqueue.yaml describes
# them, and joins what they have made. TOWN and OUTPUT have to be seen by all nodes. If it is stopped,
# submit it again: what is finished is not repeated.
#SBATCH --job-name=sugar-blocks
#SBATCH --cpus-per-task=4
#SBATCH --mem=24G
#SBATCH --time=24:00:00
set -euo pipefail

scene=$1
output=$2
blocks=$3

sugar run -s "$scene" --output_dir "$output" --blocks "$blocks" --cluster slurm -r multiview
