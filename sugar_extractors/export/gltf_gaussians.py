# SPDX-License-Identifier: Apache-2.0
"""Gaussians as glTF in one file, with KHR_gaussian_splatting, and read back.

The extension's public text of July 2026 (Khronos, a release candidate): points whose attributes
are rotation (xyzw), standard deviations, opacity and coefficients of spherical harmonics, in
float32 as they are rendered. Axes are those of glTF, y up, so a capture's Gaussians have been
turned before. Programs that do not know the extension show points in the colours of ``COLOR_0``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0
from sugar_extractors.export.compact_files import cloud_of, columns, sigmoid
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

EXTENSION = "KHR_gaussian_splatting"
_FLOAT32, _UNSIGNED_BYTE, _POINTS, _ARRAY_BUFFER = 5126, 5121, 0, 34962
_TYPES = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}
_BANDS = ((1, 0, 3), (2, 3, 8), (3, 8, 15))
"""Degree, and the rows of its coefficients among those beyond band 0."""

_MAGIC, _VERSION, _JSON, _BINARY = b"glTF", 2, b"JSON", b"BIN\0"
_ALIGNED = 4
_LIMIT = (1 << 32) - 1
_WRONG = "damaged, or another kind of glTF; export it again"


def write_gltf_gaussians(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write a binary glTF, complete or not at all.

    Returns:
        Rows of the cloud in the order of the file. (N,)
    """
    attributes = _attributes(cloud)
    views, accessors, parts, start = [], [], [], 0
    for name, values in attributes.items():
        content = np.ascontiguousarray(values).tobytes()
        view = {"buffer": 0, "byteOffset": start, "byteLength": len(content)}
        views.append({**view, "target": _ARRAY_BUFFER})
        accessors.append(_accessor(name, values, len(views) - 1))
        parts.append(content)
        start += len(content)
    header = json.dumps(_content(attributes, views, accessors, start), separators=(",", ":"))
    text = header.encode()
    text += b" " * (-len(text) % _ALIGNED)
    total = 12 + 8 + len(text) + 8 + start
    if total > _LIMIT:
        raise UserError(f"{path}: larger than the 4 GiB of the format; use --to spz")
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<4sII", _MAGIC, _VERSION, total))
        file.write(struct.pack("<I4s", len(text), _JSON) + text)
        file.write(struct.pack("<I4s", start, _BINARY))
        file.writelines(parts)
    return np.arange(len(cloud))


def _attributes(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"])
    unit = values["quats"] / np.linalg.norm(values["quats"], axis=1, keepdims=True)
    found = {
        "POSITION": values["means"],
        f"{EXTENSION}:ROTATION": np.roll(unit, -1, axis=1),
        f"{EXTENSION}:SCALE": np.exp(values["log_scales"]),
        f"{EXTENSION}:OPACITY": opacities,
        f"{EXTENSION}:SH_DEGREE_0_COEF_0": values["sh_dc"][:, 0],
    }
    for degree, first, end in _BANDS:
        for number, row in enumerate(range(first, end)):
            name = f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{number}"
            found[name] = values["sh_rest"][:, row]
    shown = np.clip(values["sh_dc"][:, 0] * SH_C0 + 0.5, 0, 1)
    fallback = np.rint(255 * np.concatenate([_linear(shown), opacities], axis=1))
    numbers = {name: array.astype("<f4") for name, array in found.items()}
    return numbers | {"COLOR_0": fallback.astype(np.uint8)}


def _linear(colors: np.ndarray) -> np.ndarray:
    """Light of colours as screens take them, which is what ``COLOR_0`` holds (IEC 61966-2-1)."""
    return np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)


def _accessor(name: str, values: np.ndarray, view: int) -> dict[str, Any]:
    kind = next(kind for kind, width in _TYPES.items() if width == values.shape[1])
    found: dict[str, Any] = {"bufferView": view, "count": len(values), "type": kind}
    if values.dtype == np.uint8:
        return {**found, "componentType": _UNSIGNED_BYTE, "normalized": True}
    found["componentType"] = _FLOAT32
    if name == "POSITION":
        found |= {"min": values.min(axis=0).tolist(), "max": values.max(axis=0).tolist()}
    return found


def _content(
    attributes: dict[str, np.ndarray], views: list[dict], accessors: list[dict], n_bytes: int
) -> dict[str, Any]:
    kernel = {
        "kernel": "ellipse",
        "colorSpace": "srgb_rec709_display",
        "projection": "perspective",
        "sortingMethod": "cameraDistance",
    }
    primitive = {
        "attributes": {name: number for number, name in enumerate(attributes)},
        "mode": _POINTS,
        "extensions": {EXTENSION: kernel},
    }
    return {
        "asset": {"version": "2.0", "generator": "sugar-trainer"},
        "extensionsUsed": [EXTENSION],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
        "accessors": accessors,
        "bufferViews": views,
        "buffers": [{"byteLength": n_bytes}],
    }


def holds_gltf_gaussians(path: Path) -> bool:
    """Whether a file is a binary glTF with Gaussians in it."""
    if path.suffix.lower() != ".glb" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(20)
        if len(start) < 20 or start[:4] != _MAGIC:
            return False
        return f'"{EXTENSION}"'.encode() in file.read(struct.unpack_from("<I", start, 12)[0])


def read_gltf_gaussians(path: Path) -> GaussianCloud:
    """Read Gaussians as :func:`write_gltf_gaussians` leaves them: float32, in glTF's axes."""
    file = require_regular_file(path).read_bytes()
    try:
        total, length = struct.unpack_from("<II", file, 8)
        if total != len(file):
            raise ValueError(f"has {len(file)} bytes, not {total}")
        content, binary = json.loads(file[20 : 20 + length]), file[28 + length :]
        (primitive,) = content["meshes"][0]["primitives"]
        names = primitive["attributes"]
        read = {name: _values(content, binary, names[name]) for name in names if name != "COLOR_0"}
        rest = [
            read[f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{number}"]
            for degree, first, end in _BANDS
            for number in range(end - first)
        ]
        position, scale = read["POSITION"], read[f"{EXTENSION}:SCALE"]
        rotation, opacity = read[f"{EXTENSION}:ROTATION"], read[f"{EXTENSION}:OPACITY"]
        color = read[f"{EXTENSION}:SH_DEGREE_0_COEF_0"]
        widths = [values.shape[1] for values in (position, scale, rotation, opacity, color, *rest)]
        if (
            widths[:4] != [3, 3, 4, 1]
            or {*widths[4:]} != {3}
            or len({*map(len, read.values())}) > 1
        ):
            raise ValueError("its attributes have other types or lengths than Gaussians have")
    except (LookupError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise UserError(f"{path}: {_WRONG} ({type(error).__name__}: {error})") from error
    finite = all(np.isfinite(values).all() for values in (position, rotation, color, *rest))
    inside = ((opacity >= 0) & (opacity <= 1)).all() and (scale > 0).all()
    if not (finite and inside and np.isfinite(scale).all() and rotation.any(axis=1).all()):
        raise UserError(f"{path}: holds numbers that make no sense; export it again")
    quats = np.roll(rotation, 1, axis=1)
    return cloud_of(position, quats, np.log(scale), opacity[:, 0], color, np.stack(rest, axis=1))


def _values(content: dict[str, Any], binary: bytes, number: int) -> np.ndarray:
    accessor = content["accessors"][number]
    view = content["bufferViews"][accessor["bufferView"]]
    if accessor["componentType"] != _FLOAT32 or "byteStride" in view:
        raise ValueError("only packed float32 values are read")
    start = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
    width, count = _TYPES[accessor["type"]], int(accessor["count"])
    values = np.frombuffer(binary, "<f4", count * width, start)
    return values.reshape(count, width).astype(np.float64)
