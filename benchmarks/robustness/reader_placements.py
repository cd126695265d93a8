# SPDX-License-Identifier: Apache-2.0
"""Records of where a file stands: beside it, within it, of earlier versions, far away."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
from numpy.lib import recfunctions
from plyfile import PlyData, PlyElement

from benchmarks.robustness.facts import Facts, Variant
from benchmarks.robustness.reader_gaussians import facts_of_cloud, small_cloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.formats.placement import UP, Origin, Placement, record_line
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.formats.readers import read_gaussians
from sugar_extractors.results import capture_of
from sugar_utils.errors import Notify

FILE = "moved.ply"
RECORD = "moved.ply.json"
_WORLD_OFFSET = np.array([500_000.0, 4_000_000.0, 301.0])
_FAR = np.array([300_000.0, 5_000_000.0, 20.0])
_MATRIX = np.array([[0.0, 2, 0, 1], [-2, 0, 0, -3], [0, 0, 2, 0.5], [0, 0, 0, 1]])
_EARLIER = ("matrix", "meaning", "up")  # keys of the records of earlier versions


def write_placed(root: Path) -> None:
    """Write Gaussians that were moved, and the record of it."""
    write_gaussian_ply(root / FILE, moved_cloud(small_cloud(), _MATRIX))
    _write_record(root, _placement())


def read_placed(root: Path, notify: Notify) -> Facts:
    """Facts of the Gaussians in the scene."""
    capture_of([root / FILE])
    return facts_of_cloud(read_gaussians(root / FILE, notify, _WORLD_OFFSET), np.zeros(3))


def placed_variant(root: Path, draw: Random) -> Variant:
    """Write the same Gaussians with the same record in another form."""
    write_placed(root)
    form = draw.choice(("earlier", "stem", "within", "far", "other photographs", "spaces"))
    record = root / RECORD
    values = json.loads(record.read_text(encoding="utf-8"))
    if form == "earlier":
        record.write_text(json.dumps({key: values[key] for key in _EARLIER}), encoding="utf-8")
    elif form == "stem":
        record.rename(root / "moved.json")
    elif form == "within":
        record.unlink()
        _rewrite(root / FILE, np.zeros(3), [record_line(values)])
    elif form == "far":
        _rewrite(root / FILE, _FAR, [])
        _write_record(root, Placement(_MATRIX, _FAR, UP, origin=_origin(root)))
    elif form == "other photographs":
        # The scene is another selection of the photographs, so its offset is another one.
        values["world_offset"] = (_WORLD_OFFSET + [1.0, 0.0, -2.0]).tolist()
        record.write_text(json.dumps(values), encoding="utf-8")
        return Variant(form, shift=(1.0, 0.0, -2.0))
    else:
        record.write_text(json.dumps(values, indent=8), encoding="utf-8")
    return Variant(form)


def _placement() -> Placement:
    return Placement(_MATRIX, up=UP, origin=Origin(world_offset=_WORLD_OFFSET))


def _origin(root: Path) -> Origin:
    return Origin(root / "model.pt", root, None, _WORLD_OFFSET)


def _write_record(root: Path, placement: Placement) -> None:
    text = json.dumps(placement.record(root))
    (root / RECORD).write_text(text, encoding="utf-8")


def _rewrite(path: Path, offset: np.ndarray, comments: list[str]) -> None:
    """Write a PLY again with float64 positions, an offset added, (3,), and further comments."""
    data = PlyData.read(str(path))
    vertices = recfunctions.repack_fields(data["vertex"].data)
    fields = [(name, "<f8" if name in "xyz" else "<f4") for name in vertices.dtype.names]
    wide = vertices.astype(np.dtype(fields))
    for axis, shift in zip("xyz", offset, strict=True):
        wide[axis] += shift
    element = PlyElement.describe(wide, "vertex")
    PlyData([element], comments=[*data.comments, *comments]).write(str(path))
