# SPDX-License-Identifier: Apache-2.0
"""Exports in the coordinates of the original capture, where those are too large for float32.

A capture in UTM or ECEF coordinates is moved to the origin when it is read. A file that holds
float64 gets its coordinates back; another one keeps them, and gets the offset as the translation of
its node, which is float64.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib import recfunctions
from plyfile import PlyData, PlyElement

from gaussian_splatting.formats.moved import GLB_AXES
from sugar_extractors.export import mesh_formats
from sugar_utils.errors import UserError

_GLB_HEADER = struct.Struct("<III")  # magic, version, length of the file
_GLB_CHUNK = struct.Struct("<II")  # length of a chunk, its type


def require_original_frame(to: str) -> None:
    """Check that a format can say coordinates with more digits than float32 has."""
    if to not in _MOVERS:
        raise UserError(
            f"--original_frame: {to} has too few digits for the coordinates of the original; "
            f"choose --to {', '.join(_MOVERS)}"
        )


def to_original_frame(path: Path, to: str, offset: np.ndarray) -> None:
    """Move a file, in the axes of the capture or the format's, by the offset of a capture.

    Args:
        path: The file, changed in place; its name may have no suffix.
        to: Its format, one that :func:`require_original_frame` accepts.
        offset: In world units and the axes of the capture. (3,)
    """
    _MOVERS[to](path, offset)


def _move_ply(path: Path, offset: np.ndarray) -> None:
    data = PlyData.read(str(path))
    vertices = recfunctions.repack_fields(data["vertex"].data)
    names = vertices.dtype.names
    kinds = [(name, "<f8" if name in ("x", "y", "z") else vertices.dtype[name]) for name in names]
    wide = vertices.astype(np.dtype(kinds))
    for axis, shift in zip("xyz", offset, strict=True):
        wide[axis] += shift
    element = PlyElement.describe(wide, "vertex")
    PlyData([element], byte_order="<", comments=data.comments).write(str(path))


def _move_obj(path: Path, offset: np.ndarray) -> None:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if line.startswith(b"v "):
            words = line.split()
            places = [float(word) + shift for word, shift in zip(words[1:4], offset, strict=True)]
            numbers = [repr(float(place)).encode() for place in places]
            lines[number] = b" ".join([b"v", *numbers, *words[4:]])
    path.write_bytes(b"\n".join(lines))


def _move_glb(path: Path, offset: np.ndarray) -> None:
    content = path.read_bytes()
    magic, version, _ = _GLB_HEADER.unpack_from(content)
    length, kind = _GLB_CHUNK.unpack_from(content, _GLB_HEADER.size)
    start = _GLB_HEADER.size + _GLB_CHUNK.size
    description = json.loads(content[start : start + length])
    shift = GLB_AXES[:3, :3] @ offset
    roots = description["scenes"][description.get("scene", 0)]["nodes"]
    for root in roots:
        node = description["nodes"][root]
        node["translation"] = (np.array(node.get("translation", [0.0] * 3)) + shift).tolist()
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    binary = content[start + length :]
    total = start + len(text) + len(binary)
    head = _GLB_HEADER.pack(magic, version, total) + _GLB_CHUNK.pack(len(text), kind)
    path.write_bytes(head + text + binary)


def _move_usd(path: Path, offset: np.ndarray) -> None:
    usd = mesh_formats.load_usd("--to usd")
    with tempfile.TemporaryDirectory() as folder:
        # The suffix decides what kind of file it is, and the temporary file has none.
        file = Path(folder) / "moved.usdc"
        file.write_bytes(path.read_bytes())
        stage = usd.Usd.Stage.Open(str(file))
        shift = GLB_AXES[:3, :3] @ offset
        prim = usd.UsdGeom.Xformable(stage.GetDefaultPrim())
        prim.AddTranslateOp(usd.UsdGeom.XformOp.PrecisionDouble).Set(tuple(map(float, shift)))
        stage.Save()
        path.write_bytes(file.read_bytes())


_MOVERS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "ply": _move_ply,
    "obj": _move_obj,
    "glb": _move_glb,
    "gltf": _move_glb,
    "usd": _move_usd,
}
