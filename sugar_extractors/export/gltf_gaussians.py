# SPDX-License-Identifier: Apache-2.0
"""Gaussians as binary glTF with ``KHR_gaussian_splatting``: y up, float32."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.core.cloud import ANTIALIASED, GaussianCloud
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.data.color_spaces import light_of_srgb
from gaussian_splatting.formats.file_placement import placed_cloud
from gaussian_splatting.formats.gltf_container import (
    BinaryPart,
    finished_glb,
    gltf_start,
    split_glb,
)
from gaussian_splatting.formats.packing import (
    BANDS,
    Columns,
    cloud_of,
    columns,
    logarithms,
    require_gaussians,
    sigmoid,
)
from sugar_extractors.export.gltf_nodes import mesh_matrix
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import atomic_path, require_regular_file

EXTENSION = "KHR_gaussian_splatting"
_FLOAT32 = 5126
_UNSIGNED_BYTE = 5121
_POINTS = 0
_NUMBERS = {5120: "i1", _UNSIGNED_BYTE: "u1", 5122: "<i2", 5123: "<u2", _FLOAT32: "<f4"}
_TYPES = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}
# Attributes beyond band 0, in the order of the rows of coefficients.
_COEFFICIENTS = [
    f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{number}"
    for degree in (1, 2, 3)
    for number in range(2 * degree + 1)
]

_KERNEL = "ellipse"
_COLORS = "srgb_rec709_display"
_WRONG = "damaged, or another kind of glTF; export it again"
_READ_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
)


def write_gltf_gaussians(path: Path, cloud: GaussianCloud) -> None:
    """Write a binary glTF with ``KHR_gaussian_splatting``, complete or not at all."""
    require_gaussians(path, cloud)
    binary = BinaryPart()
    primitive = add_gaussians(binary, cloud)
    content = gltf_start(path.name.split(".")[0], primitive, [EXTENSION])
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.writelines(finished_glb(content, binary, path, "use --to spz"))


def add_gaussians(binary: BinaryPart, cloud: GaussianCloud) -> dict[str, Any]:
    """Append Gaussians to the binary part of a GLB and return their primitive.

    Programs without the extension show it as points with the colours of ``COLOR_0``.
    """
    names = {}
    for name, values in _attributes(cloud).items():
        names[name] = binary.add_rows(values, bounds=name == "POSITION")
    kernel = {
        "kernel": _KERNEL,
        "colorSpace": _COLORS,
        "projection": "perspective",
        "sortingMethod": "cameraDistance",
    }
    primitive = {"attributes": names, "mode": _POINTS, "extensions": {EXTENSION: kernel}}
    if cloud.antialiased:
        # The extension has no word for it.
        primitive["extras"] = {ANTIALIASED: True}
    return primitive


def _attributes(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """Return the attributes of the primitive by their names, one row per Gaussian."""
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"])
    attributes = {
        "POSITION": values["means"],
        f"{EXTENSION}:ROTATION": np.roll(values["quats"], -1, axis=1),
        f"{EXTENSION}:SCALE": np.exp(values["log_scales"]),
        f"{EXTENSION}:OPACITY": opacities,
        f"{EXTENSION}:SH_DEGREE_0_COEF_0": values["sh_dc"][:, 0],
    }
    coefficients = values["sh_rest"].swapaxes(0, 1)
    attributes |= dict(zip(_COEFFICIENTS, coefficients, strict=True))
    attributes = {name: array.astype("<f4") for name, array in attributes.items()}
    colors = np.clip(sh_to_rgb(values["sh_dc"][:, 0]), 0, 1)
    # ``COLOR_0`` holds linear light, not the values of screens.
    fallback = np.rint(255 * np.concatenate([light_of_srgb(colors), opacities], axis=1))
    attributes["COLOR_0"] = fallback.astype(np.uint8)
    return attributes


def holds_gltf_gaussians(path: Path) -> bool:
    """Return whether a file is a binary glTF that names the extension."""
    if path.suffix.lower() != ".glb" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(20)
        if len(start) < 20 or start[:4] != b"glTF":
            return False
        return f'"{EXTENSION}"'.encode() in file.read(struct.unpack_from("<I", start, 12)[0])


def read_gltf_gaussians(path: Path, notify: Notify = print) -> GaussianCloud:
    """Read the Gaussians of a binary glTF that has them in one primitive, where its node is.

    Args:
        path: The file.
        notify: Called with a line for what was left out.

    Raises:
        UserError: The file is damaged, of another kind, or places them by other than a similarity.
    """
    file = require_regular_file(path).read_bytes()
    try:
        (total,) = struct.unpack_from("<I", file, 8)
        if total != len(file):
            raise ValueError(f"has {len(file)} bytes, not {total}")
        content, binary = split_glb(file)
        mesh, primitive = _primitive_of(content)
        names = primitive["attributes"]
        kernel = primitive["extensions"][EXTENSION]
        if (kernel["kernel"], kernel["colorSpace"]) != (_KERNEL, _COLORS):
            raise ValueError(f"not of kernel {_KERNEL} and colour space {_COLORS}")
        matrix = mesh_matrix(content, mesh)
        read = {name: _values(content, binary, names[name]) for name in names if name != "COLOR_0"}
        # All coefficients of a degree have to be there, and those of the degrees below.
        n_rest = sum(name in read for name in _COEFFICIENTS)
        if n_rest not in BANDS.values():
            n_rest = len(_COEFFICIENTS)
        position = read["POSITION"]
        scale = read[f"{EXTENSION}:SCALE"]
        rotation = read[f"{EXTENSION}:ROTATION"]
        opacity = read[f"{EXTENSION}:OPACITY"]
        color = read[f"{EXTENSION}:SH_DEGREE_0_COEF_0"]
        rest = [read[name] for name in _COEFFICIENTS[:n_rest]]
        widths = {values.shape[1] for values in (position, scale, color, *rest)}
        lengths = {len(values) for values in read.values()}
        is_consistent = widths == {3} and len(lengths) == 1
        if not is_consistent or rotation.shape[1] != 4 or opacity.shape[1] != 1:
            raise ValueError("its attributes have other types or lengths than Gaussians have")
    except _READ_ERRORS as error:
        raise UserError(f"{path}: {_WRONG} ({reason_of(error)})") from error
    quats = np.roll(rotation, 1, axis=1)
    harmonics = np.stack(rest, axis=1) if rest else None
    values = Columns(position, quats, logarithms(scale), opacity[:, 0], color, harmonics)
    cloud = cloud_of(path, values, notify)
    extras = primitive.get("extras")
    antialiased = isinstance(extras, dict) and extras.get(ANTIALIASED) is True
    return placed_cloud(replace(cloud, antialiased=antialiased), matrix, path, notify)


def _primitive_of(content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the only primitive with Gaussians, and its mesh; there may be others, of triangles."""
    parts = [(i, part) for i, mesh in enumerate(content["meshes"]) for part in mesh["primitives"]]
    (of_gaussians,) = (item for item in parts if EXTENSION in item[1].get("extensions", {}))
    return of_gaussians


def _values(content: dict[str, Any], binary: bytes, number: int) -> np.ndarray:
    """Return the values of an accessor as float64, one row per Gaussian."""
    accessor = content["accessors"][number]
    view = content["bufferViews"][accessor["bufferView"]]
    kind = np.dtype(_NUMBERS[accessor["componentType"]])
    width = _TYPES[accessor["type"]]
    start = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
    stride = view.get("byteStride", width * kind.itemsize)
    shape = (int(accessor["count"]), width)
    strides = (stride, kind.itemsize)
    values = np.ndarray(shape, kind, binary, start, strides).astype(np.float64)
    if not accessor.get("normalized", False):
        return values
    return np.maximum(values / np.iinfo(kind).max, -1)
