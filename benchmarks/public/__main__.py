# SPDX-License-Identifier: Apache-2.0
"""The field's tables: ``python -m benchmarks.public BENCHMARK --data FOLDER``.

Trains the scenes of DTU, Tanks and Temples, Mip-NeRF 360 or NeRF-synthetic by the defaults of this
program, scores them by the protocol of the papers, and writes ``table.md`` and ``table.json`` with
published rows beside ours. The same command goes on where it was interrupted. Further flags of the
training follow ``--flags``, such as ``--flags --resolution_factor 2``; rows of other flags need
another ``--row``, and are in the same table. See ``DOCS/PUBLIC_BENCHMARKS.md``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.public.jobs import SURFACE_BENCHMARKS, Job
from benchmarks.public.layouts import SCENES, scene_folder
from benchmarks.public.runner import run_jobs
from benchmarks.public.table import OURS, write_table
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, positive_float, positive_int


def parser() -> Parser:
    flags = Parser(
        prog="python -m benchmarks.public",
        description="Train and score the scenes of a public benchmark.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("benchmark", choices=tuple(SCENES))
    add("--data", type=Path, required=True, help="folder of the data set")
    add("--truth", type=Path, help="folder of the scans, where it is another one")
    add("--scenes", nargs="+", help="some scenes; unset: all of the table. scan24 may be 24")
    add("--out", type=Path, help="folder of all results; unset: output/public/BENCHMARK")
    add("--row", default=OURS, help="name of the row, and of its folder")
    add("--minutes", type=positive_float, help="of the whole pipeline for a scene (dtu, tanks)")
    add("--workers", type=positive_int, default=1, help="scenes at a time, each on its own GPU")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the training")
    return flags


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """Make the jobs of the flags, one for each scene.

    Raises:
        UserError: A scene is not of the benchmark or not in the data, or a flag cannot act.
    """
    if args.minutes is not None and args.benchmark not in SURFACE_BENCHMARKS:
        raise UserError(
            f"--minutes: {args.benchmark} trains 3DGS alone, whose table is of 30,000 iterations; "
            "pass --flags --schedule_scale 0.1 for a quick run"
        )
    known = SCENES[args.benchmark]
    scenes = list(known)
    if args.scenes is not None:
        scenes = [f"scan{name}" if name.isdigit() else name for name in args.scenes]
    unknown = [name for name in scenes if name not in known]
    if unknown:
        raise UserError(f"--scenes {unknown[0]}: choose from {', '.join(known)}")
    out = args.out or Path("output") / "public" / args.benchmark
    for scene in scenes:
        scene_folder(args.data, scene)
    return [
        Job(
            benchmark=args.benchmark,
            scene=scene,
            data=str(args.data.resolve()),
            truth=None if args.truth is None else str(args.truth.resolve()),
            out=str(out.resolve() / args.row / scene),
            minutes=args.minutes,
            flags=tuple(args.flags),
        )
        for scene in scenes
    ]


def run() -> None:
    args = parser().parse_args()
    jobs = make_jobs(args)
    failures = run_jobs(jobs, args.workers)
    table = write_table(Path(jobs[0].out).parents[1], args.benchmark)
    print(table.read_text(encoding="utf-8"))
    print(f"written: {table}")
    if failures:
        print(*failures, sep="\n", file=sys.stderr)
        raise UserError(f"{len(failures)} of {len(jobs)} scenes failed; see the lines above")


if __name__ == "__main__":
    sys.exit(run_main(run))
