# SPDX-License-Identifier: Apache-2.0
"""Parts of binary glTF 2.0 files: headers, the JSON part, and the binary part."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sugar_utils.errors import UserError

_GLB_LIMIT = (1 << 32) - 1
_JPEG = b"\xff\xd8\xff"
# Numbers of the glTF 2.0 specification.
_UINT8 = 5121
_UINT16 = 5123
_UINT32 = 5125
_FLOAT32 = 5126
_ARRAY_BUFFER = 34962
_ELEMENT_ARRAY_BUFFER = 34963
_TYPES = {1: "SCALAR", 3: "VEC3", 4: "VEC4"}  # by their widths
_LARGEST_UINT16 = 65_535  # vertices that indices of 16 bits reach: the last number ends a strip


class BinaryPart:
    """The binary part of a GLB under construction, with its accessors and views."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.size = 0
        self.views: list[dict[str, Any]] = []
        self.accessors: list[dict[str, Any]] = []

    def add_view(self, content: bytes | memoryview, target: int | None = None) -> int:
        """Append bytes and return the number of their view; all begin at multiples of four."""
        view = {"buffer": 0, "byteOffset": self.size, "byteLength": len(content)}
        if target is not None:
            view["target"] = target
        padding = b"\0" * (-len(content) % 4)
        self.parts += [content, padding]
        self.size += len(content) + len(padding)
        self.views.append(view)
        return len(self.views) - 1

    def add_floats(self, values: Tensor, bounds: bool = False) -> int:
        """Append one vector per vertex, (C, N), and return the number of its accessor."""
        array = values.float().cpu().numpy().astype("<f4")
        accessor = {
            "bufferView": self.add_view(array.tobytes(), _ARRAY_BUFFER),
            "componentType": _FLOAT32,
            "count": len(array),
            "type": f"VEC{array.shape[1]}",
        }
        if bounds:
            accessor["min"] = array.min(axis=0).tolist()
            accessor["max"] = array.max(axis=0).tolist()
        self.accessors.append(accessor)
        return len(self.accessors) - 1

    def add_rows(self, rows: np.ndarray, bounds: bool = False) -> int:
        """Append one row per vertex, (C, N), without a copy; return the number of its accessor.

        Args:
            rows: float32, or uint8 for values from 0 to 1.
            bounds: Say between which values they lie, as positions have to.
        """
        rows = np.ascontiguousarray(rows)
        accessor = {
            "bufferView": self.add_view(rows.data.cast("B"), _ARRAY_BUFFER),
            "count": len(rows),
            "type": _TYPES[rows.shape[1]],
        }
        if rows.dtype == np.uint8:
            accessor |= {"componentType": _UINT8, "normalized": True}
        else:
            accessor["componentType"] = _FLOAT32
        if bounds:
            accessor |= {"min": rows.min(axis=0).tolist(), "max": rows.max(axis=0).tolist()}
        self.accessors.append(accessor)
        return len(self.accessors) - 1

    def add_indices(self, rows: Tensor, n_vertices: int) -> int:
        """Append the vertices of triangles, (F, 3), and return the number of the accessor."""
        short = n_vertices <= _LARGEST_UINT16
        array = rows.cpu().numpy().astype("<u2" if short else "<u4")
        self.accessors.append(
            {
                "bufferView": self.add_view(array.tobytes(), _ELEMENT_ARRAY_BUFFER),
                "componentType": _UINT16 if short else _UINT32,
                "count": array.size,
                "type": "SCALAR",
            }
        )
        return len(self.accessors) - 1

    def add_picture(self, picture: bytes) -> dict[str, Any]:
        """Append a PNG or JPEG and return its entry among the images."""
        kind = "jpeg" if picture.startswith(_JPEG) else "png"
        return {"bufferView": self.add_view(picture), "mimeType": f"image/{kind}"}


def glb_head(content: dict[str, Any], path: Path, instead: str) -> bytes:
    """Return the bytes of a GLB before its binary part: headers and the JSON part.

    Args:
        instead: Advice where the file is too large.

    Raises:
        UserError: The file would be larger than 4 GiB.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    n_binary = content["buffers"][0]["byteLength"]
    total = 12 + 8 + len(text) + 8 + n_binary
    if total > _GLB_LIMIT:
        raise UserError(f"{path}: larger than the 4 GiB of a GLB file; {instead}")
    file_header = struct.pack("<4sII", b"glTF", 2, total)
    json_header = struct.pack("<I4s", len(text), b"JSON")
    binary_header = struct.pack("<I4s", n_binary, b"BIN\0")
    return file_header + json_header + text + binary_header


def finished_glb(
    content: dict[str, Any], binary: BinaryPart, path: Path, instead: str
) -> Iterator[bytes | memoryview]:
    """Yield a GLB in parts; the JSON part gets its tables of the binary part.

    Args:
        content: The JSON part without these tables.
        binary: The binary part.
        path: Name of the file, for the error.
        instead: Advice where the file is too large.

    Raises:
        UserError: The file would be larger than 4 GiB.
    """
    content["accessors"] = binary.accessors
    content["bufferViews"] = binary.views
    content["buffers"] = [{"byteLength": binary.size}]
    yield glb_head(content, path, instead)
    yield from binary.parts


def split_glb(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the JSON part of a file that begins as :func:`glb_head` writes it, and the binary."""
    (length,) = struct.unpack_from("<I", file, 12)
    return json.loads(file[20 : 20 + length]), file[28 + length :]


def read_root_extras(path: Path) -> dict[str, Any]:
    """Read the ``extras`` of the first root node of a GLB, and nothing else of the file.

    They are empty where there are none, or where the file is damaged: who reads it all says how.
    """
    with path.open("rb") as file:
        head = file.read(20)
        if len(head) < 20 or not head.startswith(b"glTF") or head[16:20] != b"JSON":
            return {}
        (length,) = struct.unpack_from("<I", head, 12)
        text = file.read(length)
    try:
        description = json.loads(text)
        scene = description["scenes"][description.get("scene", 0)]
        extras = description["nodes"][scene["nodes"][0]]["extras"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}
    return extras if isinstance(extras, dict) else {}


def gltf_start(name: str, primitive: dict[str, Any], extensions: Sequence[str]) -> dict[str, Any]:
    """Return the JSON part of a glTF of one mesh, without its buffers."""
    content: dict[str, Any] = {
        "asset": {"version": "2.0", "generator": "sugar-trainer"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"name": name, "mesh": 0}],
        "meshes": [{"name": name, "primitives": [primitive]}],
    }
    if extensions:
        content["extensionsUsed"] = list(extensions)
    return content
