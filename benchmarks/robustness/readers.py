# SPDX-License-Identifier: Apache-2.0
"""Damaged files for every reader: ``python benchmarks/robustness/readers.py --cases 500 --seed 0``.

Each case damages one file of a valid set (``reader_files.py``). Reading must then end with finite
numbers, or with one line and an exit code of 2. Readers run in children with limits on memory and
time, as in ``fuzz.py``, which runs whole commands.

A case follows from ``--seed`` and its number alone; ``--case`` repeats one and shows its output.
Linux only.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

if __name__ == "__main__":
    # A forked child must find no threads of a GPU driver or of a thread pool.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import torch

from benchmarks.robustness import mutations
from benchmarks.robustness import reader_files as files
from benchmarks.robustness.campaign import Result, Worker, campaign_parser, run_cases
from benchmarks.robustness.child import run_child
from benchmarks.robustness.damage import damage_bytes, damage_file
from benchmarks.robustness.judgement import ENDS, FAULTS, Expectation, judge, snapshot
from benchmarks.robustness.reader_files import Numbers
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import Notify, printable, say_nothing

NOT_FINITE = "not_finite.txt"
_IN_PLACE = 0.08  # share of damages that put something else in the place of a file
_COPIES = 0.04  # share of damages that put another file in its place


@dataclass(frozen=True)
class Reader:
    """A reader of the product with its files.

    Attributes:
        write: Fills an empty folder with valid files.
        read: Reads them from the folder.
        patterns: Patterns of the files that are damaged.
    """

    write: Callable[[Path], object]
    read: Callable[[Path, Notify], Numbers]
    patterns: tuple[str, ...]


def _scene_reader(part: str, *patterns: str) -> Reader:
    """A reader of one layout of the scene."""

    def read(root: Path, notify: Notify) -> Numbers:
        return files.read_scene(root / part, notify)

    return Reader(files.write_capture, read, tuple(f"{part}/{pattern}" for pattern in patterns))


_CHECKPOINT = ("checkpoint/cameras.json", "checkpoint/cfg_args", "checkpoint/exposure.json")
READERS = {
    "colmap bin": _scene_reader("scene", "sparse/0/*.bin"),
    "colmap txt": _scene_reader("text", "sparse/0/*.txt"),
    "transforms.json": _scene_reader("ngp", "transforms.json", "transforms.json", "points.ply"),
    "transforms of a split": _scene_reader("nerf", "*.json"),
    "masks": _scene_reader("scene", "masks/*"),
    "depth maps": _scene_reader("scene", "depths/*.npy", "depths/*", "confidence/*"),
    "zip": Reader(files.write_zip, files.read_zip, ("scan.zip",)),
    "world_offset.json": Reader(
        files.write_offset_scene,
        lambda root, notify: files.read_scene(root / "scene", notify),
        ("scene/world_offset.json",),
    ),
    "checkpoint": Reader(files.write_checkpoint, files.read_checkpoint, _CHECKPOINT),
    "transform.json": Reader(files.write_results, files.read_results, ("out/transform.json",)),
    "placement": Reader(
        files.write_placed, files.read_placed, (files.PLACED, *[f"{files.PLACED}.json"] * 2)
    ),
    "settings": Reader(files.write_settings, files.read_settings, ("settings.toml",)),
    "points": Reader(files.write_points, files.read_points, ("points.ply",)),
    "mesh": Reader(files.write_mesh, files.read_mesh, ("mesh.ply",)),
    "obj": Reader(files.write_obj, files.read_obj, ("*.obj", "*.mtl", "*.png")),
    **{
        program: Reader(write, partial(files.read_program, program), ("**/*.*",))
        for program, write in files.CAMERAS.items()
    },
    **{
        name: Reader(partial(files.write_format, name), partial(files.read_format, name), (name,))
        for name in files.GAUSSIANS
    },
}
_OFTEN = ("a.ply", "transforms.json", "depth maps", "masks", "checkpoint")
TURNS = (*READERS, *_OFTEN)
"""Reader of case k: entry k modulo their number, so that a case depends on its number alone."""


class _Worker(Worker):
    @staticmethod
    def warm_up(root: Path, many_cases: bool) -> None:
        """Read every valid file once, so that children find everything loaded."""
        torch.set_num_threads(1)
        for name, reader in READERS.items():
            folder = root / name
            folder.mkdir(parents=True)
            reader.write(folder)
            reader.read(folder, say_nothing)

    def make_base(self) -> Path:
        """Write the valid files of every reader."""
        base = self.own / "base"
        for name, reader in READERS.items():
            (base / name).mkdir(parents=True)
            reader.write(base / name)
        return base

    def run(self, case: int) -> Result:
        name = TURNS[case % len(TURNS)]
        reader = READERS[name]
        self.clear()
        shutil.copytree(self.base / name, self.root, dirs_exist_ok=True)
        what = _damage(self.root, reader, Random(f"{self.seed}/{case}"))
        before = snapshot(self.root)
        inputs = tuple(sorted({Path(path).parts[0] for path in before} - {"out"}))
        main = partial(self._read, reader)
        outcome = run_child(main, [], self.root, self.notes, self.limits)
        judged = judge(outcome, Expectation(self.root, before, inputs))
        faults = dict(judged.faults)
        if judged.end == "accepted":
            bad = (self.notes / NOT_FINITE).read_text(encoding="utf-8")
            if bad:
                faults["wrong"] = f"{bad} is not finite"
        return Result(case, name, what, judged.end, faults, (outcome,))

    def _read(self, reader: Reader) -> None:
        """Read files, and write down the first of the numbers that is not finite, if any is."""
        numbers = reader.read(self.root, lambda line: print(printable(line)))
        bad = [name for name, values in numbers.items() if not np.isfinite(values).all()]
        (self.notes / NOT_FINITE).write_text(ascii(bad[0]) if bad else "", encoding="utf-8")


def _damage(root: Path, reader: Reader, draw: Random) -> str:
    """Damage one of the files of a reader."""
    pattern = draw.choice(reader.patterns)
    target = draw.choice([path for path in sorted(root.glob(pattern)) if path.is_file()])
    kind = draw.random()
    if kind < _IN_PLACE:
        what = draw.choice(mutations.IN_PLACE)
        mutations.put_in_place(target, what)
        return f"{what} in place of {target.name}"
    if kind < _IN_PLACE + _COPIES:
        other = draw.choice([path for path in sorted(root.rglob("*")) if path.is_file()])
        target.write_bytes(other.read_bytes())
        return f"{target.name} is a copy of {other.name}"
    what = damage_file(target, draw)
    if draw.random() < 0.1 and target.exists():
        what += f"; {damage_bytes(target, draw)}"
    return what


def main() -> int:
    args = campaign_parser(__doc__, cases=500, seconds=20.0).parse_args()
    return run_cases("readers.py", args, _Worker, ENDS, FAULTS)


if __name__ == "__main__":
    sys.exit(run_main(main))
