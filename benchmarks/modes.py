# SPDX-License-Identifier: Apache-2.0
"""Meshes of all modes on scenes whose geometry is known: ``python benchmarks/modes.py SCENE...``.

Each scene gets one vanilla checkpoint, which every mode starts from. Modes are trained and meshed
by the functions of ``train_full_pipeline.py``; what stands behind ``--`` are its flags. Figures are
those of ``mesh_quality.py``, and the seconds of the stages after the vanilla one. A second call
goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.mesh_quality import print_qualities
from benchmarks.rasterizer import print_machine
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.vanilla.vanilla_run import train_vanilla
from sugar_extractors.quality.mesh_quality import MeshQuality, compare_surfaces, read_reference
from sugar_extractors.quality.mesh_report import read_any_mesh
from sugar_pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline_run import run_stages
from sugar_pipeline.plan import full_plan
from sugar_trainers.coarse_config import MODES
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser
from sugar_utils.frame import run_main

RESULT_FILE = "modes.json"
MESHES = ("coarse", "refined")
_STAGE_OF = dict(zip(MESHES, ("mesh", "refine"), strict=True))


def split_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The script's own arguments, and those of the pipeline after ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def vanilla_checkpoint(scene: Path, folder: Path, flags: list[str]) -> tuple[Path, int]:
    """The checkpoint that all modes start from, trained now or before, and its iteration."""
    args = full_parser(None).parse_args(
        ["-r", MODES[0], *flags, "-s", str(scene), "--output_dir", str(folder)]
    )
    if args.gs_output_dir is not None:
        return args.gs_output_dir, args.vanilla_iterations
    vanilla = full_plan(args).vanilla
    train_vanilla(vanilla)
    return vanilla.model_path, scaled(args.vanilla_iterations, args.schedule_scale)


def run_mode(
    mode: str, scene: Path, checkpoint: tuple[Path, int], args: argparse.Namespace, flags: list[str]
) -> tuple[MeshQuality, float]:
    """Figures of one mode's mesh, and the seconds of its stages."""
    path, iteration = checkpoint
    own = ["-r", mode, "-s", str(scene), "--stop_after", _STAGE_OF[args.mesh]]
    own += ["--gs_output_dir", str(path), "--vanilla_iterations", str(iteration)]
    own += ["--output_dir", str(args.output / scene.name / mode)]
    result = run_stages(full_plan(full_parser(None).parse_args([*flags, *own])))
    mesh = result.coarse_mesh if args.mesh == "coarse" else result.refined
    quality = compare_surfaces(read_any_mesh(mesh), read_reference(scene))
    return quality, sum(record.seconds for record in result.records)


def run(args: argparse.Namespace, flags: list[str]) -> None:
    """Train, measure, print one table for each scene."""
    about = print_machine()
    for scene in args.scenes:
        read_reference(scene)
    figures = {}
    for scene in args.scenes:
        checkpoint = vanilla_checkpoint(scene, args.output / scene.name, flags)
        found = {mode: run_mode(mode, scene, checkpoint, args, flags) for mode in args.modes}
        qualities, seconds = zip(*found.values(), strict=True)
        print(f"\nscene: {scene}, {args.mesh} meshes\n")
        print_qualities(list(found), list(qualities), list(seconds), "seconds of the stages")
        figures[scene.name] = {
            mode: {**quality.record(), "seconds": taken} for mode, (quality, taken) in found.items()
        }
    record = {"about": about, "flags": flags, "mesh": args.mesh, "scenes": figures}
    write_json_atomic(args.output / RESULT_FILE, record)
    print(f"\nwritten: {args.output / RESULT_FILE}")


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Measure the meshes of all modes. What stands behind -- goes to the pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("scenes", type=Path, nargs="+", metavar="SCENE", help="folders with ground truth")
    add("--modes", nargs="+", choices=MODES, default=MODES, help="which to compare")
    add("--mesh", choices=MESHES, default=MESHES[0], help="which mesh is measured")
    add("--output", type=Path, default=Path("output") / "modes", help="folder of all results")
    return flags


def main() -> None:
    """Parse and run."""
    own, flags = split_command(sys.argv[1:])
    run(parser().parse_args(own), flags)


if __name__ == "__main__":
    sys.exit(run_main(main))
