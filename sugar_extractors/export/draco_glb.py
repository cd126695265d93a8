# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as GLB whose triangles are compressed by Draco: by the package DracoPy."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from sugar_extractors.texture.textured_mesh_io import TexturedMesh, glb_chunks, png_bytes
from sugar_utils.files import atomic_path
from sugar_utils.optional_packages import load_package

EXTENSION = "KHR_draco_mesh_compression"
_POSITION_BITS = 14
_STEPS_PER_TEXEL = 16
_EFFORT = 7
_POSITION, _TEXTURE = 0, 3
"""Kinds of attributes, as Draco numbers them."""

_UNSIGNED_INT = 5125
_ALIGNED = 4


def load_draco() -> Any:
    """The package.

    Raises:
        UserError: It is not installed.
    """
    return load_package("--draco", "DracoPy", "DracoPy", instead="leave --draco out")[0]


def write_draco_glb(path: Path, mesh: TexturedMesh, *, y_up: bool = False) -> float:
    """Write a compressed GLB, complete or not at all.

    Corners are rounded to a 16384th of the longest side, texture coordinates to a 16th of a texel.
    Programs that do not know ``KHR_draco_mesh_compression`` cannot open it.

    Args:
        path: File to write.
        mesh: What to write.
        y_up: As of ``glb_chunks``.

    Returns:
        How far a corner has moved at most, in world units.

    Raises:
        UserError: DracoPy is not installed, or the file cannot be written.
    """
    plain = b"".join(glb_chunks(mesh, png_bytes(mesh.texture), path, y_up))
    length = struct.unpack_from("<I", plain, 12)[0]
    content, binary = json.loads(plain[20 : 20 + length]), plain[28 + length :]
    corners, places = (_accessor(content, binary, number) for number in (0, 1))
    picture = _view(content, binary, content["images"][0]["bufferView"])
    packed, error = _compressed(content, corners, places, max(mesh.texture.shape[:2]))
    parts = [part + b"\0" * (-len(part) % _ALIGNED) for part in (packed, picture)]
    starts = (0, len(parts[0]))
    content["bufferViews"] = [
        {"buffer": 0, "byteOffset": start, "byteLength": len(part)}
        for start, part in zip(starts, (packed, picture), strict=True)
    ]
    content["images"][0]["bufferView"] = 1
    content["buffers"] = [{"byteLength": sum(map(len, parts))}]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    body = b"".join(parts)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<4sII", b"glTF", 2, 28 + len(text) + len(body)))
        file.write(struct.pack("<I4s", len(text), b"JSON") + text)
        file.write(struct.pack("<I4s", len(body), b"BIN\0") + body)
    return error


def _compressed(
    content: dict[str, Any], corners: np.ndarray, places: np.ndarray, side: int
) -> tuple[bytes, float]:
    """The triangles in Draco's form, which the JSON part is told of, and how far corners moved.

    Args:
        content: The JSON part of the file that is not compressed.
        corners: Of all faces, three after three. (3 F, 3)
        places: Their texture coordinates. (3 F, 2)
        side: Of the texture, in texels.
    """
    draco = load_draco()
    faces = np.arange(len(corners), dtype=np.uint32).reshape(-1, 3)
    packed = draco.encode(
        corners.astype(np.float64),
        faces,
        tex_coord=places.astype(np.float64),
        quantization_bits=_POSITION_BITS,
        tex_coord_quantization_bits=math.ceil(math.log2(_STEPS_PER_TEXEL * side)),
        compression_level=_EFFORT,
        # Every corner has a place of its own in the picture, so an order need not be kept.
        preserve_order=False,
    )
    found = draco.decode(packed)
    ids = {entry["attribute_type"]: entry["unique_id"] for entry in found.attributes}
    points = np.asarray(found.points, dtype=np.float64)
    (primitive,) = content["meshes"][0]["primitives"]
    attributes = {"POSITION": ids[_POSITION], "TEXCOORD_0": ids[_TEXTURE]}
    primitive["extensions"] = {EXTENSION: {"bufferView": 0, "attributes": attributes}}
    primitive["indices"] = 2
    position, texture = content["accessors"]
    for accessor in (position, texture):
        del accessor["bufferView"]
        accessor["count"] = len(points)
    position |= {"min": points.min(axis=0).tolist(), "max": points.max(axis=0).tolist()}
    indices = {"componentType": _UNSIGNED_INT, "type": "SCALAR", "count": int(found.faces.size)}
    content["accessors"].append(indices)
    content["extensionsUsed"].append(EXTENSION)
    content["extensionsRequired"] = [EXTENSION]
    # Rounding is to steps of the longest side; half of one on each axis.
    step = float(np.ptp(corners, axis=0).max()) / ((1 << _POSITION_BITS) - 1)
    return packed, step / 2 * math.sqrt(3)


def _accessor(content: dict[str, Any], binary: bytes, number: int) -> np.ndarray:
    """Float32 values of a GLB that ``glb_chunks`` made. (count, width)"""
    accessor = content["accessors"][number]
    width = {"VEC2": 2, "VEC3": 3}[accessor["type"]]
    return np.frombuffer(_view(content, binary, accessor["bufferView"]), "<f4").reshape(-1, width)


def _view(content: dict[str, Any], binary: bytes, number: int) -> bytes:
    view = content["bufferViews"][number]
    return binary[view["byteOffset"] : view["byteOffset"] + view["byteLength"]]
