# SPDX-License-Identifier: Apache-2.0
"""The blocks of a capture and their folders.

::

    OUTPUT/blocks/SCENE/overview/               the overview, like a checkpoint of 3DGS
    OUTPUT/blocks/SCENE/4_blocks/blocks.json    boxes and views of all blocks; written last
    OUTPUT/blocks/SCENE/4_blocks/block_00/
        settings.toml                    flags of its training: sugar run --config settings.toml
        scene/                           parts of the photographs, masks, cameras and points
        results/                         of its training
        depths/                          depth and colour of its views
        mesh.ply, splats.ply             its part of the results
    OUTPUT/SCENE/                               results of the whole capture
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene.regions import Corner, corner_of
from sugar_utils.files import read_json
from sugar_utils.recipe import Recipe
from sugar_utils.schemas import conform

OVERVIEW = "overview"  # folder
PLAN_FILE = "blocks.json"
SETTINGS_FILE = "settings.toml"
_INFINITE = 1e300  # stands for infinity in the file


class _BoxRecord(msgspec.Struct):
    """A block in the file of the plan."""

    low: Corner
    high: Corner
    views: int


class _PlanRecord(msgspec.Struct):
    """The file of the plan."""

    blocks: list[_BoxRecord]
    margin: float
    bounds: tuple[Corner, Corner]


@dataclass(frozen=True)
class Block:
    """One block of a capture."""

    number: int
    folder: Path
    box: BlockBox  # the space that belongs to it
    n_views: int

    @property
    def scene(self) -> Path:
        """Its scene folder."""
        return self.folder / "scene"

    @property
    def settings(self) -> Path:
        """File with the flags of its training."""
        return self.folder / SETTINGS_FILE

    @property
    def results(self) -> Path:
        """Folder above the results of its training."""
        return self.folder / "results"

    @property
    def depths(self) -> Path:
        """Folder of the depth of its views."""
        return self.folder / "depths"

    @property
    def mesh(self) -> Path:
        """Its part of the mesh."""
        return self.folder / "mesh.ply"

    @property
    def splats(self) -> Path:
        """Its part of the Gaussians."""
        return self.folder / "splats.ply"


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of a capture."""

    folder: Path
    blocks: tuple[Block, ...]
    margin: float  # by which blocks reach into each other, world units
    bounds: BlockBox  # what is meshed; finite

    def write(self, recipe: Recipe) -> None:
        """Write the plan; it is there once all folders of the blocks are complete."""
        blocks = []
        for block in self.blocks:
            low = _finite(block.box.low)
            high = _finite(block.box.high)
            blocks.append({"low": low, "high": high, "views": block.n_views})
        bounds = [self.bounds.low, self.bounds.high]
        recipe.write(self.folder / PLAN_FILE, blocks=blocks, margin=self.margin, bounds=bounds)


def block_folder(folder: Path, number: int) -> Path:
    """Return the folder of a block."""
    return folder / f"block_{number:02d}"


def read_plan(folder: Path) -> BlockPlan | None:
    """Read the plan of a folder; None where there is none yet."""
    record = _read_record(folder)
    if record is None:
        return None
    blocks = []
    for number, box in enumerate(record.blocks):
        space = BlockBox(_infinite(box.low), _infinite(box.high))
        blocks.append(Block(number, block_folder(folder, number), space, box.views))
    return BlockPlan(folder, tuple(blocks), record.margin, BlockBox(*record.bounds))


def _read_record(folder: Path) -> _PlanRecord | None:
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    return conform(read_json(path), _PlanRecord, path, "remove it, and the blocks are cut again")


def _finite(values: Sequence[float]) -> list[float]:
    return np.clip(values, -_INFINITE, _INFINITE).tolist()


def _infinite(values: Corner) -> Corner:
    return corner_of(
        value if abs(value) < _INFINITE else np.copysign(np.inf, value) for value in values
    )
