# SPDX-License-Identifier: Apache-2.0
"""Exports in coordinates of the original capture or of a map, which are too large for float32.

A capture in UTM or ECEF coordinates is moved to the origin when it is read, and one that is put on
a map stays near zero. A file that holds float64 gets its coordinates back; another one keeps them,
and gets the offset as the translation of its node, which is float64.

Every mover changes a file in place, whose name may have no suffix. ``offset``, (3,), is in the
units and the axes of the file.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import recfunctions
from plyfile import PlyData, PlyElement

from gaussian_splatting.formats.gltf_container import glb_head, split_glb
from gaussian_splatting.formats.placement import KEY, record_line
from sugar_extractors.export.engines.glb_files import LEVELS_EXTENSION
from sugar_extractors.export.usd.library import load_usd

_PLY_FORMAT = b"format "  # begins the second line of a PLY, which comments may follow


def move_ply(path: Path, offset: np.ndarray) -> None:
    """Add the offset to the vertices of a PLY in float64."""
    data = PlyData.read(str(path))
    vertices = recfunctions.repack_fields(data["vertex"].data)
    fields = []
    for name in vertices.dtype.names:
        is_coordinate = name in ("x", "y", "z")
        fields.append((name, "<f8" if is_coordinate else vertices.dtype[name]))
    wide = vertices.astype(np.dtype(fields))
    for axis, shift in zip("xyz", offset, strict=True):
        wide[axis] += shift
    element = PlyElement.describe(wide, "vertex")
    PlyData([element], byte_order="<", comments=data.comments).write(str(path))


def move_obj(path: Path, offset: np.ndarray) -> None:
    """Add the offset to the vertices of an OBJ, with all digits of float64."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line.startswith(b"v "):
            continue
        words = line.split()
        coordinates = []
        for word, shift in zip(words[1:4], offset, strict=True):
            coordinate = float(float(word) + shift)
            coordinates.append(repr(coordinate).encode())
        lines[number] = b" ".join([b"v", *coordinates, *words[4:]])
    path.write_bytes(b"\n".join(lines))


def move_glb(path: Path, offset: np.ndarray) -> None:
    """Add the offset to the translation of the root nodes of a GLB."""
    description, binary = split_glb(path.read_bytes())
    for node in _outer_nodes(description):
        translation = np.array(node.get("translation", [0.0, 0.0, 0.0]))
        node["translation"] = (translation + offset).tolist()
    head = glb_head(description, path, "leave out --original_frame")
    path.write_bytes(head + binary)


def note_in_glb(path: Path, values: Mapping[str, object]) -> None:
    """Write values into the extras of the root nodes of a GLB, which viewers show as properties."""
    description, binary = split_glb(path.read_bytes())
    for node in _outer_nodes(description):
        node["extras"] = {**node.get("extras", {}), **values}
    head = glb_head(description, path, "leave out --gcp and --gps")
    path.write_bytes(head + binary)


def note_in_obj(path: Path, values: Mapping[str, object]) -> None:
    """Write the record of where an OBJ stands into its first line, a comment."""
    _insert(path, f"# {record_line(values[KEY])}\n", after=b"")


def note_in_ply(path: Path, values: Mapping[str, object]) -> None:
    """Write the record of where a PLY stands into its header, as a comment."""
    _insert(path, f"comment {record_line(values[KEY])}\n", after=_PLY_FORMAT)


def _insert(path: Path, line: str, after: bytes) -> None:
    """Insert a line into a file, behind the first line with some bytes; none: at its beginning."""
    with tempfile.TemporaryFile() as copy:
        with path.open("rb") as file:
            shutil.copyfileobj(file, copy)
        copy.seek(0)
        with path.open("wb") as file:
            if after:
                for header_line in copy:
                    file.write(header_line)
                    if after in header_line:
                        break
            file.write(line.encode())
            shutil.copyfileobj(copy, file)


def _outer_nodes(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the root nodes of a GLB, and the other levels of detail of each."""
    nodes = description["nodes"]
    scene = description["scenes"][description.get("scene", 0)]
    outer = []
    for root in scene["nodes"]:
        outer.append(nodes[root])
        levels = nodes[root].get("extensions", {}).get(LEVELS_EXTENSION, {"ids": []})
        outer += [nodes[level] for level in levels["ids"]]
    return outer


def move_usd(path: Path, offset: np.ndarray) -> None:
    """Add the offset as a translation of the default prim of a USD crate file."""
    usd = load_usd("--to usd")
    with tempfile.TemporaryDirectory() as folder:
        # USD goes by the suffix, and the temporary file has none.
        file = Path(folder) / "moved.usdc"
        file.write_bytes(path.read_bytes())
        stage = usd.Usd.Stage.Open(str(file))
        prim = usd.UsdGeom.Xformable(stage.GetDefaultPrim())
        operation = prim.AddTranslateOp(usd.UsdGeom.XformOp.PrecisionDouble)
        operation.Set(tuple(map(float, offset)))
        stage.Save()
        path.write_bytes(file.read_bytes())
