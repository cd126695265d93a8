# SPDX-License-Identifier: Apache-2.0
"""Malformed input for every script: ``python benchmarks/robustness/fuzz.py --cases 1000 --seed 0``.

Each case corrupts one thing in a copy of a small world of files (``world.py``): an image, a model,
a checkpoint, a flag, a name (``targets.py``). The entry point that reads it runs in a child process
with limits on memory and time. It must end with finite results, or with one line and an exit code
of 2 to 4, and leave everything else as it was. Anything else is a fault; then the exit code is 1.

A case follows from ``--seed`` and its number alone; ``--case`` repeats one and shows its output.
Linux only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

if __name__ == "__main__":
    # A forked child must find no threads of a GPU driver or of a thread pool.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.robustness.campaign import Result, Worker, campaign_parser, run_cases
from benchmarks.robustness.judgement import ENDS, FAULTS, Expectation, judge, snapshot
from benchmarks.robustness.targets import corrupt, expected_bits, kind_of, parts_of
from benchmarks.robustness.world import copy_parts, run_command
from sugar_utils.entrypoint import run_main

INPUTS = (
    "scene",
    "text",
    "nerf",
    "ngp",
    "vanilla",
    "points.ply",
    "cloud.ply",
    "mesh.ply",
    "scenes.json",
    "exports",
    "path.json",
    "known.xml",
    "zipped.zip",
    "settings.toml",
)


class _Worker(Worker):
    def run(self, case: int) -> Result:
        self.clear()
        root, kind, limits = self.root, kind_of(case), self.limits
        copy_parts(self.base, root, parts_of(kind))
        plan = corrupt(kind, root, Random(f"{self.seed}/{case}"))
        if plan.lengthy:
            limits = replace(limits, seconds=4.0, stacks=False)
        same_bits = expected_bits(plan, root, self.base)
        before = snapshot(root)
        outcome = run_command(plan.command, root, self.notes, limits, plan.words)
        fallback = plan.same_bits == "fallback"
        expected = Expectation(root, before, INPUTS, plan.lengthy, same_bits, fallback)
        found, what = judge(outcome, expected), f"{plan.command.name}: {plan.what}"
        return Result(case, kind, what, found.end, found.faults, (outcome,))


def main() -> int:
    args = campaign_parser(__doc__, cases=300, seconds=20.0).parse_args()
    return run_cases("fuzz.py", args, _Worker, ENDS, FAULTS)


if __name__ == "__main__":
    sys.exit(run_main(main))
