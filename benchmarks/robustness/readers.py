# SPDX-License-Identifier: Apache-2.0
"""Files of every kind for every reader: ``python benchmarks/robustness/readers.py --seed 0``.

Half of the cases damage a file. Reading must then end with finite numbers, or with one line and an
exit code of 2. The other half write what is valid in another form: names with spaces, in other
Unicode forms, encodings and cases; other types, units and orders; a thousandth of the size, or a
million units from the origin. Reading must give the same cameras, points and Gaussians, or refuse
what cannot be meant. Readers run in children with limits on memory and time, as in ``fuzz.py``,
which runs whole commands.

A case follows from ``--seed`` and its number alone; ``--case`` repeats one and shows its output.
Linux only.
"""

from __future__ import annotations

import json
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
from PIL import Image

from benchmarks.robustness import mutations
from benchmarks.robustness import reader_cameras as cameras
from benchmarks.robustness import reader_gaussians as gaussians
from benchmarks.robustness import reader_placements as placements
from benchmarks.robustness import reader_records as records
from benchmarks.robustness import reader_scenes as scenes
from benchmarks.robustness import reader_surfaces as surfaces
from benchmarks.robustness import scene_variants as variants
from benchmarks.robustness.campaign import Result, Worker, campaign_parser, run_cases
from benchmarks.robustness.child import Limits, run_child
from benchmarks.robustness.damage import damage_bytes, damage_file
from benchmarks.robustness.facts import (
    Facts,
    Variant,
    differences,
    expected_facts,
    not_finite,
)
from benchmarks.robustness.judgement import ENDS, FAULTS, Expectation, judge, snapshot
from gaussian_splatting.scenes.scene_path import scene_folder
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import Notify, printable

FACTS = "facts.json"
_IN_PLACE = 0.08  # share of damages that put something else in the place of a file
_COPIES = 0.04  # share of damages that put another file in its place
_ALL_FAULTS = (*FAULTS, "unequal", "end")


@dataclass(frozen=True)
class Reader:
    """A reader of the product with its files.

    Attributes:
        write: Fills an empty folder with valid files.
        read: Reads them from the folder.
        patterns: Patterns of the files that are damaged.
        variant: Fills an empty folder with other valid files.
    """

    write: Callable[[Path], None]
    read: Callable[[Path, Notify], Facts]
    patterns: tuple[str, ...]
    variant: Callable[[Path, Random], Variant]


def _write_colmap(kind: str, root: Path) -> None:
    scenes.write_colmap(root, scenes.Capture(), kind)
    _write_maps(root)


def _write_maps(root: Path) -> None:
    scenes.write_masks(root / "masks", scenes.NAMES)
    scenes.write_depths(root / "depths", scenes.NAMES, root / "confidence")


def _write_transforms(root: Path) -> None:
    lists = {"train_filenames": (2, 3, 4), "test_filenames": (0,), "val_filenames": (1, 5)}
    scenes.write_transforms(root, scenes.Capture(lists=lists))


def _write_masks(root: Path) -> None:
    scenes.write_colmap(root, scenes.Capture(), "bin")
    scenes.write_masks(root / "masks", scenes.NAMES)


def _write_depths(root: Path) -> None:
    """Depth maps of every kind of file, and the confidence of some."""
    scenes.write_colmap(root, scenes.Capture(), "bin")
    for number, name in enumerate(scenes.NAMES):
        stem = root / "depths" / Path(name).stem
        stem.parent.mkdir(exist_ok=True)
        whole = np.rint(1000 * scenes.depth_of(number)).astype(np.uint16)
        if number % 3 == 0:
            np.save(stem.with_suffix(".npy"), whole)
        else:
            Image.fromarray(whole).save(stem.with_suffix(".tif" if number % 3 == 1 else ".png"))
    (root / "confidence").mkdir()
    levels = np.full((scenes.HEIGHT, scenes.WIDTH), 2, np.uint8)
    np.save(root / "confidence" / "view_00.npy", levels)
    Image.fromarray(levels).save(root / "confidence" / "view_01.png")


def _write_zip(root: Path) -> None:
    scenes.write_colmap(root / "scan", scenes.Capture(), "bin")
    scenes.write_zip(root / "scan.zip", root / "scan")


def _read_zip(root: Path, notify: Notify) -> Facts:
    return scenes.read_scene(scene_folder(root / "scan.zip", [root / "out"], notify), notify)


def _readers() -> dict[str, Reader]:
    table = {
        f"colmap {kind}": Reader(
            partial(_write_colmap, kind),
            scenes.read_scene,
            (f"sparse/0/*.{kind}",),
            variants.colmap_variant(kind),
        )
        for kind in ("bin", "txt")
    }
    table |= {
        "transforms.json": Reader(
            _write_transforms,
            scenes.read_scene,
            ("transforms.json", "transforms.json", "points.ply"),
            variants.transforms_variant,
        ),
        "masks": Reader(_write_masks, scenes.read_scene, ("masks/*",), variants.mask_variant),
        "depth maps": Reader(
            _write_depths,
            scenes.read_scene,
            ("depths/*.npy", "depths/*", "confidence/*"),
            variants.depth_variant,
        ),
        "zip": Reader(_write_zip, _read_zip, ("scan.zip",), variants.zip_variant),
    }
    for program in cameras.PROGRAMS:
        table[program] = Reader(
            partial(cameras.write_cameras, program=program),
            cameras.read_program,
            ("**/[!p]*.*",),
            cameras.cameras_variant(program),
        )
    for name in gaussians.FORMATS:
        table[name.split(".", 1)[1]] = Reader(
            gaussians.write_format(name),
            gaussians.read_format(name),
            (name,),
            gaussians.gaussians_variant(name),
        )
    table["spz v2"] = _of_format("d.spz")
    table["spz v3"] = _of_format("c.spz")
    table["spz v4"] = _of_format("e.spz")
    del table["spz"]
    table |= {
        "points": Reader(
            surfaces.write_points_file,
            surfaces.read_points_file,
            ("points.ply",),
            surfaces.points_variant,
        ),
        "obj": Reader(
            surfaces.write_obj,
            surfaces.read_obj,
            ("*.obj", "*.mtl", "*.png"),
            surfaces.obj_variant,
        ),
        "mesh": Reader(
            surfaces.write_mesh, surfaces.read_mesh, ("mesh.ply",), surfaces.mesh_variant
        ),
        "world_offset.json": Reader(
            records.write_offset_scene,
            records.read_offset_scene,
            ("world_offset.json",),
            records.offset_variant,
        ),
        "checkpoint": Reader(
            records.write_checkpoint,
            records.read_checkpoint,
            ("checkpoint/cameras.json", "checkpoint/cfg_args", "checkpoint/exposure.json"),
            records.checkpoint_variant,
        ),
        "transform.json": Reader(
            records.write_results,
            records.read_results,
            ("out/transform.json",),
            records.results_variant,
        ),
        "placement": Reader(
            placements.write_placed,
            placements.read_placed,
            (placements.FILE, placements.RECORD, placements.RECORD),
            placements.placed_variant,
        ),
        "settings": Reader(
            records.write_settings_file,
            records.read_settings_file,
            ("settings.toml",),
            records.settings_variant,
        ),
    }
    return table


def _of_format(name: str) -> Reader:
    return Reader(
        gaussians.write_format(name),
        gaussians.read_format(name),
        (name,),
        gaussians.gaussians_variant(name),
    )


READERS = _readers()
_OFTEN = ("ply", "transforms.json", "depth maps", "masks", "checkpoint")
TURNS = (*READERS, *_OFTEN)
"""Reader of case k: entry k modulo their number, so that a case depends on its number alone."""


class _Worker(Worker):
    def __init__(self, seed: int, limits: Limits, own: Path) -> None:
        super().__init__(seed, limits, own)
        self._facts: dict[str, Facts] = {}

    @staticmethod
    def warm_up(root: Path, many_cases: bool) -> None:
        """Read every valid file once, so that children find everything loaded."""
        torch.set_num_threads(1)
        for name, reader in READERS.items():
            folder = root / name
            folder.mkdir(parents=True)
            reader.write(folder)
            reader.read(folder, lambda line: None)

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
        draw = Random(f"{self.seed}/{case}")
        self.clear()
        if draw.random() < 0.5:
            shutil.copytree(self.base / name, self.root, dirs_exist_ok=True)
            what = _damage(self.root, reader, draw)
            variant = None
        else:
            variant = reader.variant(self.root, draw)
            what = variant.what
            if "skipped" in variant.ends:
                return Result(case, name, "not possible", "accepted", {}, ())
        before = snapshot(self.root)
        inputs = tuple(sorted({Path(path).parts[0] for path in before} - {"out"}))
        main = partial(self._read, reader)
        outcome = run_child(main, [], self.root, self.notes, self.limits)
        judged = judge(outcome, Expectation(self.root, before, inputs))
        faults = dict(judged.faults)
        if judged.end == "accepted":
            facts = json.loads((self.notes / FACTS).read_text(encoding="utf-8"))
            if bad := not_finite(facts):
                faults["wrong"] = f"{bad} is not finite"
            if variant is not None and "accepted" in variant.ends:
                expected = expected_facts(self._facts_of(name), variant)
                unequal = list(differences(expected, facts, variant.scale))
                if unequal:
                    faults["unequal"] = "; ".join(unequal[:3])
        if variant is not None and judged.end not in variant.ends and not faults:
            faults["end"] = f"{judged.end}, not {' or '.join(variant.ends)}: {outcome.err[-200:]!r}"
        return Result(case, name, what, judged.end, faults, (outcome,))

    def _read(self, reader: Reader) -> None:
        facts = reader.read(self.root, lambda line: print(printable(line)))
        text = json.dumps(facts, ensure_ascii=True)
        (self.notes / FACTS).write_text(text, encoding="utf-8")

    def _facts_of(self, name: str) -> Facts:
        """Facts of the valid files of a reader, which are read once."""
        if name not in self._facts:
            folder = self.own / "valid" / name
            shutil.copytree(self.base / name, folder)
            facts = READERS[name].read(folder, lambda line: None)
            self._facts[name] = json.loads(json.dumps(facts))
        return self._facts[name]


def _damage(root: Path, reader: Reader, draw: Random) -> str:
    """Damage one of the files of a reader."""
    pattern = draw.choice(reader.patterns)
    files = [path for path in sorted(root.glob(pattern)) if path.is_file()]
    target = draw.choice(files)
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
    return run_cases("readers.py", args, _Worker, ENDS, _ALL_FAULTS)


if __name__ == "__main__":
    sys.exit(run_main(main))
