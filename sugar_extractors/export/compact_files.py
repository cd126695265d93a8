# SPDX-License-Identifier: Apache-2.0
"""Compact files of Gaussians, ``.splat``, SPZ, glTF, SOG, and how far they are from the originals.

``.splat``: position and scale are 3 + 3 float32; colour, opacity and rotation (wxyz) are bytes.
Those that cover most come first, because pages show what has arrived. SPZ: a gzip stream of a
header of 16 bytes and, one after the other for all Gaussians, positions (24-bit fixed point),
opacities, colours, logarithmic scales (8 bits each), rotations (the three smallest parts of a
quaternion in 10 bits each) and spherical harmonics (8 bits, of which 5 are used in band 1 and 4
beyond). Version 4 has a table of sizes behind the header, and each attribute is a zstd frame. Axes
are x right, y up, z back. SOG, PlayCanvas' format for web pages: lossless WebP images of bytes in a
ZIP, a texel each. Positions are sign(x) log(1 + |x|) in 16 bits between a least and a largest
number; rotations the three smallest parts of a quaternion (wxyz) in 8 bits; scales and colours rows
of a list of 256 numbers; spherical harmonics rows of a palette whose numbers are such rows. Axes as
in a PLY.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from PIL import Image
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, rotation_matrices
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh, sh_to_rgb
from sugar_extractors.texture.textured_mesh_io import glb_head, gltf_start
from sugar_utils.errors import UserError, explained
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.random import generator

_NEARLY = 0.25 / 255


def shares(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from 0 to 1 as whole numbers of so many bits; others become the nearest. uint32"""
    most = (1 << bits) - 1
    return np.clip(np.floor(values * most + 0.5), 0, most).astype(np.uint32)


def smallest_three(quats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place of the largest part of quaternions, (N,), and the others of unit length, (N, 3).

    Their order stays; their signs are such that the largest is positive: within +-sqrt(1/2).
    """
    unit = _unit(quats)
    largest = np.abs(unit).argmax(axis=1)
    unit = unit * np.where(unit[np.arange(len(unit)), largest] < 0, -1.0, 1.0)[:, None]
    return largest, unit[np.arange(4) != largest[:, None]].reshape(-1, 3)


def from_smallest_three(largest: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Unit quaternions again. (N,), (N, 3) -> (N, 4)"""
    quats = np.empty((len(three), 4))
    quats[np.arange(4) != largest[:, None]] = three.ravel()
    rest = np.sqrt(np.maximum(0.0, 1.0 - (three**2).sum(axis=1)))
    quats[np.arange(len(quats)), largest] = rest
    return _unit(quats)


def columns(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """Parameters of a cloud by name, float64 on the host; quaternions of unit length."""
    found = {name: tensor.cpu().double().numpy() for name, tensor in cloud.tensors().items()}
    return {**found, "quats": _unit(found["quats"])}


def _unit(quats: np.ndarray) -> np.ndarray:
    return quats / np.linalg.norm(quats, axis=1, keepdims=True)


def cloud_of(
    path: Path, means: np.ndarray, quats: np.ndarray, log_scales: np.ndarray,
    opacities: np.ndarray, sh_dc: np.ndarray, sh_rest: np.ndarray | None = None,
) -> GaussianCloud:  # fmt: skip
    """A cloud of what a file holds, (N, ...) each; ``sh_rest`` None for none, quats wxyz.

    Opacities are in [0, 1]; the ends, whose logits are infinite, move inwards by less than the 8
    bits of the formats tell.
    """
    rest = np.zeros((len(means), 15, 3))
    if sh_rest is not None:
        rest[:, : sh_rest.shape[1]] = sh_rest
    inside = ((opacities >= 0) & (opacities <= 1)).all() and quats.any(axis=1).all()
    if not (inside and all(np.isfinite(n).all() for n in (means, log_scales, sh_dc, rest, quats))):
        raise UserError(f"{path}: holds numbers that make no sense; export it again")
    opacities = np.clip(opacities, _NEARLY, 1 - _NEARLY)
    logits = np.log(opacities / (1 - opacities))[:, None]
    arrays = (means, sh_dc[:, None], rest, logits, log_scales, quats)
    return GaussianCloud(*(torch.from_numpy(array.astype(np.float32)) for array in arrays))


def logarithms(scales: np.ndarray) -> np.ndarray:
    """Natural logarithms; not finite where a scale is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(scales)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


@dataclass(frozen=True)
class Fidelity:
    """Largest differences of all Gaussians."""

    position: float
    scale: float
    rotation: float  # of axes, weighted by how much longer than the shortest they are; degrees
    color: float
    opacity: float
    harmonics: float

    def line(self) -> str:
        return (
            f"largest errors: position {self.position:.2g}, size {self.scale:.2%}, rotation "
            f"{self.rotation:.2g} degrees, colour {self.color:.2g} and opacity {self.opacity:.2g} "
            f"of 255; view-dependent colour {self.harmonics:.2g} on average"
        )


def fidelity(written: GaussianCloud, found: GaussianCloud) -> Fidelity:
    a, b = columns(written), columns(found)
    difference = {name: np.abs(a[name] - b[name]) for name in a}
    scales = np.exp(a["log_scales"])
    shortest, longest = (end(scales, axis=1, keepdims=True) for end in (np.min, np.max))
    axes = [rotation_matrices(torch.from_numpy(values["quats"])) for values in (a, b)]
    cosines = (axes[0] * axes[1]).sum(dim=1).abs().clamp(max=1).numpy()
    # Rotations of Gaussians that are round say nothing, so only what turns a long axis counts.
    turned = np.degrees(np.arccos(cosines)) * (1 - shortest / scales)
    opacities = np.abs(sigmoid(a["opacity_logits"]) - sigmoid(b["opacity_logits"]))
    colors = [np.clip(sh_to_rgb(c["sh_dc"]), 0, 1) for c in (a, b)]
    sizes = np.abs(np.exp(b["log_scales"]) - scales) / longest
    return Fidelity(
        position=float(difference["means"].max()), scale=float(sizes.max()),
        rotation=float(turned.max()), color=255 * float(np.abs(colors[0] - colors[1]).max()),
        opacity=255 * float(opacities.max()),
        harmonics=float(np.sqrt((difference["sh_rest"] ** 2).mean())),
    )  # fmt: skip


ROW = np.dtype([("mean", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("rotation", "u1", 4)])


def write_splat(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write a ``.splat`` file, complete or not at all; rows of the cloud in its order. (N,)"""
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"][:, 0])
    rows = np.zeros(len(cloud), ROW)
    rows["mean"], rows["scale"] = values["means"], np.exp(values["log_scales"])
    rows["rgba"] = shares(np.column_stack([sh_to_rgb(values["sh_dc"][:, 0]), opacities]), 8)
    rows["rotation"] = np.clip(np.rint(values["quats"] * 128) + 128, 0, 255)
    weight = values["log_scales"].sum(axis=1) + np.log(np.maximum(opacities, 1e-12))
    order = np.argsort(-weight, kind="stable")
    with atomic_path(path) as temporary:
        temporary.write_bytes(rows[order].tobytes())
    return order


def read_splat(path: Path) -> GaussianCloud:
    content = require_regular_file(path).read_bytes()
    if not content or len(content) % ROW.itemsize:
        raise UserError(f"{path}: damaged, or no .splat file (rows have 32 bytes); export it again")
    rows = np.frombuffer(content, ROW)
    means, scales, rgba = rows["mean"].astype(float), rows["scale"].astype(float), rows["rgba"]
    quats = (rows["rotation"].astype(float) - 128) / 128
    quats[~quats.any(axis=1)] = (1, 0, 0, 0)
    colors = rgb_to_sh(rgba[:, :3] / 255)
    return cloud_of(path, means, quats, logarithms(scales), rgba[:, 3] / 255, colors)


MAGIC = 0x5053474E
_HEADER, _TABLE = struct.Struct("<IIIBBBB"), struct.Struct("<QQ")
_TABLE_START = 32
_BANDS = {0: 0, 1: 3, 2: 8, 3: 15, 4: 24}
_MOST_COMPRESSED = 1024
_ANTIALIASED = 1  # flag
_MAX_FRACTION_BITS = 20
_COLOR_SCALE = 0.15
_ROTATION_STEPS = 511
_XYZW = [1, 2, 3, 0]


def write_spz(path: Path, cloud: GaussianCloud, version: int = 3) -> None:
    """Write an SPZ file of version 3 or 4, complete or not at all."""
    fraction_bits, parts = _spz_parts(cloud)
    head = MAGIC, version, len(cloud), 3, fraction_bits, _ANTIALIASED * cloud.antialiased
    if version == 3:
        # Without the time of day, the same Gaussians give the same bytes.
        content = gzip.compress(_HEADER.pack(*head, 0) + b"".join(parts), mtime=0)
    else:
        packed = [zstandard.ZstdCompressor(level=12).compress(part) for part in parts]
        sizes = (_TABLE.pack(len(p), len(part)) for p, part in zip(packed, parts, strict=True))
        start = _HEADER.pack(*head, len(parts)) + struct.pack("<I12x", _TABLE_START)
        content = b"".join((start, *sizes, *packed))
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _spz_parts(cloud: GaussianCloud) -> tuple[int, list[bytes]]:
    """Bits behind the point of positions, and the attributes one after the other."""
    values = columns(cloud)
    means = values["means"]
    reach = max(float(np.abs(means).max(initial=0.0)), 1e-9)
    # As many bits behind the point as the farthest one leaves room for.
    fraction_bits = int(np.clip(np.floor(np.log2(((1 << 23) - 1) / reach)), 0, _MAX_FRACTION_BITS))
    fixed = np.clip(np.rint(means * (1 << fraction_bits)), -(1 << 23), (1 << 23) - 1)
    largest, three = smallest_three(values["quats"][:, _XYZW])
    size = np.floor(np.abs(three) * np.sqrt(2) * _ROTATION_STEPS + 0.5).astype(np.uint32)
    rotations = largest.astype(np.uint32)
    # Two bits for the place of the largest part, ten for each other: sign and size.
    for column in range(3):
        sign = (three[:, column] < 0).astype(np.uint32)
        rotations = rotations << 10 | sign << 9 | np.minimum(size[:, column], _ROTATION_STEPS)
    # Steps of 8 in band 1 and of 16 beyond compress well.
    steps = np.where(np.arange(15) < 3, 8, 16)[None, :, None]
    harmonics = (np.rint(values["sh_rest"] * 128) + 128 + steps // 2) // steps * steps
    return fraction_bits, [
        fixed.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(),
        _bytes(sigmoid(values["opacity_logits"]) * 255),
        _bytes((values["sh_dc"][:, 0] * _COLOR_SCALE + 0.5) * 255),
        _bytes((values["log_scales"] + 10) * 16),
        rotations.astype("<u4").tobytes(),
        _bytes(harmonics),
    ]


def _bytes(values: np.ndarray) -> bytes:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8).tobytes()


def _unpacked_spz(content: bytes) -> bytes:
    """Header and attributes of any version, one after the other."""
    if content[:4] != MAGIC.to_bytes(4, "little"):
        return gzip.decompress(content)
    start = struct.unpack_from("<I", content, _HEADER.size)[0]
    table = [_TABLE.unpack_from(content, start + _TABLE.size * k) for k in range(content[15])]
    place, parts = start + _TABLE.size * len(table), [content[: _HEADER.size]]
    for size, unpacked in table:
        if unpacked > _MOST_COMPRESSED * len(content):
            raise EOFError("sizes that cannot be")
        unpacker = zstandard.ZstdDecompressor()
        parts.append(unpacker.decompress(content[place : place + size], unpacked))
        place += size
    return b"".join(parts)


def read_spz(path: Path) -> GaussianCloud:
    """Read an SPZ file of version 2 to 4: Gaussians in the axes of the format, to degree 3."""
    kinds = (
        *(OSError, EOFError, LookupError, ValueError, OverflowError, MemoryError),
        *(zlib.error, struct.error, zstandard.ZstdError),
    )
    with explained(f"{path}: damaged, or no SPZ file", "export it again", *kinds):
        content = _unpacked_spz(require_regular_file(path).read_bytes())
        magic, version, n, degree, fraction_bits, flags, _ = _HEADER.unpack_from(content)
    if magic != MAGIC or version not in (2, 3, 4) or degree not in _BANDS or fraction_bits > 23:
        raise UserError(f"{path}: not an SPZ file of version 2 to 4 and degree 0 to 4")
    widths = (9, 1, 3, 3, 3 if version == 2 else 4, 3 * _BANDS[degree])
    if n == 0 or len(content) < _HEADER.size + n * sum(widths):
        raise UserError(f"{path}: holds no {n} Gaussians, it was cut off; export it again")
    data = np.frombuffer(content, np.uint8, n * sum(widths), _HEADER.size)
    parts = np.split(data, n * np.cumsum(widths)[:-1])
    positions, alphas, colors, scales, rotations, harmonics = (
        part.reshape(n, width) for part, width in zip(parts, widths, strict=True)
    )
    # Signed numbers of three bytes each.
    three = positions.reshape(-1, 3).astype(np.int64)
    fixed = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
    fixed = np.where(fixed >= 1 << 23, fixed - (1 << 24), fixed).reshape(-1, 3)
    cloud = cloud_of(
        path, fixed / (1 << fraction_bits), _quats(rotations)[:, [3, 0, 1, 2]], scales / 16 - 10,
        alphas[:, 0] / 255, (colors / 255 - 0.5) / _COLOR_SCALE,
        ((harmonics.astype(float) - 128) / 128).reshape(n, -1, 3)[:, :15],
    )  # fmt: skip
    return replace(cloud, antialiased=bool(flags & _ANTIALIASED))


def _quats(data: np.ndarray) -> np.ndarray:
    """Unit quaternions, xyzw. (N, 3) or (N, 4) uint8 -> (N, 4)"""
    if data.shape[1] == 3:
        xyz = data / 127.5 - 1
        real = np.sqrt(np.maximum(0.0, 1 - (xyz**2).sum(axis=1)))
        return np.concatenate([xyz, real[:, None]], axis=1)
    packed = np.ascontiguousarray(data).view("<u4")[:, 0]
    three = np.stack([(packed >> shift) & 0x3FF for shift in (20, 10, 0)], axis=1)
    size = (three & _ROTATION_STEPS) / (_ROTATION_STEPS * np.sqrt(2))
    signed = np.where(three >> 9 == 1, -size, size)
    return from_smallest_three((packed >> 30).astype(np.int64), signed)


EXTENSION = "KHR_gaussian_splatting"
_FLOAT32, _UNSIGNED_BYTE, _POINTS, _ARRAY_BUFFER = 5126, 5121, 0, 34962
_NUMBERS = {5120: "i1", _UNSIGNED_BYTE: "u1", 5122: "<i2", 5123: "<u2", _FLOAT32: "<f4"}
_TYPES = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}
# Attributes beyond band 0, in the order of the rows of coefficients.
_COEFFICIENTS = [
    f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{number}"
    for degree in (1, 2, 3)
    for number in range(2 * degree + 1)
]

_KERNEL, _COLORS = "ellipse", "srgb_rec709_display"
_WRONG = "damaged, or another kind of glTF; export it again"


def write_gltf_gaussians(path: Path, cloud: GaussianCloud) -> None:
    attributes = _attributes(cloud)
    views, accessors, start = [], [], 0
    for number, (name, values) in enumerate(attributes.items()):
        kind = next(kind for kind, width in _TYPES.items() if width == values.shape[1])
        accessor = {"bufferView": number, "count": len(values), "type": kind}
        if values.dtype == np.uint8:
            accessor |= {"componentType": _UNSIGNED_BYTE, "normalized": True}
        else:
            accessor["componentType"] = _FLOAT32
        if name == "POSITION":
            accessor |= {"min": values.min(axis=0).tolist(), "max": values.max(axis=0).tolist()}
        accessors.append(accessor)
        place = {"buffer": 0, "byteOffset": start, "byteLength": values.nbytes}
        views.append({**place, "target": _ARRAY_BUFFER})
        start += values.nbytes
    kernel = {
        "kernel": _KERNEL, "colorSpace": _COLORS, "projection": "perspective",
        "sortingMethod": "cameraDistance",
    }  # fmt: skip
    numbers = {name: number for number, name in enumerate(attributes)}
    primitive = {"attributes": numbers, "mode": _POINTS, "extensions": {EXTENSION: kernel}}
    content = {
        **gltf_start(EXTENSION, primitive), "accessors": accessors, "bufferViews": views,
        "buffers": [{"byteLength": start}],
    }  # fmt: skip
    head = glb_head(content, path, "use --to spz")
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        file.writelines(values.tobytes() for values in attributes.values())


def _attributes(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"])
    found = {
        "POSITION": values["means"], f"{EXTENSION}:ROTATION": np.roll(values["quats"], -1, axis=1),
        f"{EXTENSION}:SCALE": np.exp(values["log_scales"]), f"{EXTENSION}:OPACITY": opacities,
        f"{EXTENSION}:SH_DEGREE_0_COEF_0": values["sh_dc"][:, 0],
    }  # fmt: skip
    found |= dict(zip(_COEFFICIENTS, values["sh_rest"].swapaxes(0, 1), strict=True))
    shown = np.clip(sh_to_rgb(values["sh_dc"][:, 0]), 0, 1)
    # Light of colours as screens take them, which is what ``COLOR_0`` holds (IEC 61966-2-1).
    linear = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    fallback = np.rint(255 * np.concatenate([linear, opacities], axis=1))
    numbers = {name: array.astype("<f4") for name, array in found.items()}
    return numbers | {"COLOR_0": fallback.astype(np.uint8)}


def holds_gltf_gaussians(path: Path) -> bool:
    if path.suffix.lower() != ".glb" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(20)
        if len(start) < 20 or start[:4] != b"glTF":
            return False
        return f'"{EXTENSION}"'.encode() in file.read(struct.unpack_from("<I", start, 12)[0])


def read_gltf_gaussians(path: Path) -> GaussianCloud:
    """Read the Gaussians of a binary glTF, in its axes; of several primitives there is one."""
    file = require_regular_file(path).read_bytes()
    try:
        total, length = struct.unpack_from("<II", file, 8)
        if total != len(file):
            raise ValueError(f"has {len(file)} bytes, not {total}")
        content, binary = json.loads(file[20 : 20 + length]), file[28 + length :]
        (primitive,) = content["meshes"][0]["primitives"]
        names, kernel = primitive["attributes"], primitive["extensions"][EXTENSION]
        if (kernel["kernel"], kernel["colorSpace"]) != (_KERNEL, _COLORS):
            raise ValueError(f"not of kernel {_KERNEL} and colour space {_COLORS}")
        if any({"matrix", "rotation", "scale", "translation"} & {*n} for n in content["nodes"]):
            raise ValueError("its node is moved")
        read = {name: _values(content, binary, names[name]) for name in names if name != "COLOR_0"}
        own = ("SCALE", "ROTATION", "OPACITY", "SH_DEGREE_0_COEF_0")
        # Bands are whole, and those below them are there.
        n_rest = sum(name in read for name in _COEFFICIENTS)
        whole = _COEFFICIENTS[: n_rest if n_rest in _BANDS.values() else 15]
        position, rest = read["POSITION"], [read[name] for name in whole]
        scale, rotation, opacity, color = (read[f"{EXTENSION}:{name}"] for name in own)
        widths = [values.shape[1] for values in (rotation, opacity, position, scale, color, *rest)]
        if widths[:2] != [4, 1] or {*widths[2:]} != {3} or len({*map(len, read.values())}) > 1:
            raise ValueError("its attributes have other types or lengths than Gaussians have")
    except (
        *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
        *(MemoryError, struct.error),
    ) as error:
        raise UserError(f"{path}: {_WRONG} ({type(error).__name__}: {error})") from error
    quats = np.roll(rotation, 1, axis=1)
    harmonics = np.stack(rest, axis=1) if rest else None
    return cloud_of(path, position, quats, logarithms(scale), opacity[:, 0], color, harmonics)


def _values(content: dict[str, Any], binary: bytes, number: int) -> np.ndarray:
    accessor = content["accessors"][number]
    view = content["bufferViews"][accessor["bufferView"]]
    kind, width = np.dtype(_NUMBERS[accessor["componentType"]]), _TYPES[accessor["type"]]
    start = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
    stride = view.get("byteStride", width * kind.itemsize)
    shape, strides = (int(accessor["count"]), width), (stride, kind.itemsize)
    values = np.ndarray(shape, kind, binary, start, strides).astype(np.float64)
    if not accessor.get("normalized", False):
        return values
    return np.maximum(values / np.iinfo(kind).max, -1)


_PALETTE, _ROW = 4096, 64  # most colours of the palette, and how many lie side by side
_ROUNDS, _SAMPLES, _CHUNK = 4, 16, 8192
_LARGEST = 252  # of a quaternion's fourth byte if w is its largest part; then x, y, z


def write_sog(path: Path, cloud: GaussianCloud) -> None:
    values = columns(cloud)
    places = np.sign(values["means"]) * np.log1p(np.abs(values["means"]))
    low, high = places.min(axis=0), places.max(axis=0)
    fixed = shares((places - low) / np.maximum(high - low, 1e-12), 16)
    scale_book, scales = _rows_of(values["log_scales"])
    color_book, colors = _rows_of(values["sh_dc"][:, 0])
    largest, three = smallest_three(values["quats"])
    quats = np.column_stack([shares(three / np.sqrt(2) + 0.5, 8), largest + _LARGEST])
    opacities = shares(sigmoid(values["opacity_logits"]), 8)
    images = {"means_l": fixed & 255, "means_u": fixed >> 8, "scales": scales, "quats": quats,
              "sh0": np.column_stack([colors, opacities])}  # fmt: skip
    meta: dict[str, Any] = {
        "version": 2, "asset": {"generator": "sugar-trainer"}, "count": len(cloud),
        "antialias": False, "means": {"mins": low.tolist(), "maxs": high.tolist()},
        "scales": {"codebook": scale_book}, "quats": {}, "sh0": {"codebook": color_book},
    }  # fmt: skip
    side = int(np.ceil(np.sqrt(len(cloud))))
    shapes = dict.fromkeys(images, side)
    if values["sh_rest"].any():
        palette, labels = _palette(torch.from_numpy(values["sh_rest"]).flatten(1).float())
        book, rows = _rows_of(palette.numpy())
        images["shN_centroids"] = rows.reshape(-1, 3)
        images["shN_labels"] = np.column_stack([labels & 255, labels >> 8, labels * 0])
        meta["shN"] = {"count": len(palette), "bands": 3, "codebook": book}
        shapes |= {"shN_centroids": _ROW * _BANDS[3], "shN_labels": side}
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, texels in images.items():
            meta[name.split("_")[0]].setdefault("files", []).append(f"{name}.webp")
            # Without the time of day, the same Gaussians give the same bytes.
            archive.writestr(zipfile.ZipInfo(f"{name}.webp"), _webp(texels, shapes[name]))
        archive.writestr(zipfile.ZipInfo("meta.json"), json.dumps(meta))


def _webp(texels: np.ndarray, width: int) -> bytes:
    """An image of so many texels in a row; those that are missing at the end are 0."""
    height, buffer = -(-len(texels) // width), io.BytesIO()
    image = np.zeros((height * width, texels.shape[1]), np.uint8)
    image[: len(texels)] = texels
    picture = Image.fromarray(image.reshape(height, width, -1))
    picture.save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()


def _rows_of(values: np.ndarray) -> tuple[list[float], np.ndarray]:
    """256 numbers, and for each value the row of the nearest one: means of parts (Lloyd)."""
    ordered = np.sort(values, axis=None).astype(np.float64)
    book, total = np.quantile(ordered, (np.arange(256) + 0.5) / 256), np.cumsum([0.0, *ordered])
    for _ in range(_ROUNDS):
        ends = np.searchsorted(ordered, (book[1:] + book[:-1]) / 2)
        ends = np.concatenate([[0], ends, [len(ordered)]])
        counts = np.diff(ends)
        book = np.where(counts > 0, np.diff(total[ends]) / np.maximum(counts, 1), book)
    return book.tolist(), np.searchsorted((book[1:] + book[:-1]) / 2, values)


def _palette(rows: Tensor) -> tuple[Tensor, np.ndarray]:
    """At most so many rows that stand for all (k-means of a sample), and which one for each."""
    order = torch.randperm(len(rows), generator=generator(0, "palette"), device="cpu")
    palette, sample = rows[order[:_PALETTE]], rows[order[: _SAMPLES * _PALETTE]]
    for _ in range(_ROUNDS if len(sample) > len(palette) else 0):
        nearest = _nearest(sample, palette)
        counts = torch.bincount(nearest, minlength=len(palette))[:, None]
        sums = torch.zeros_like(palette).index_add_(0, nearest, sample)
        palette = torch.where(counts > 0, sums / counts.clamp(min=1), palette)
    return palette, _nearest(rows, palette).numpy()


def _nearest(rows: Tensor, palette: Tensor) -> Tensor:
    return torch.cat([torch.cdist(part, palette).argmin(dim=1) for part in rows.split(_CHUNK)])


def read_sog(path: Path) -> GaussianCloud:
    """Read a ``.sog`` file of version 2."""
    try:
        with zipfile.ZipFile(require_regular_file(path)) as archive:
            meta = json.loads(archive.read("meta.json"))
            if meta["version"] != 2:
                raise ValueError(f"version {meta['version']}, not 2")
            return _cloud_of_images(path, archive, meta)
    except (*IMAGE_ERRORS, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: damaged, or no SOG file ({reason}); export it again") from error


def _cloud_of_images(path: Path, archive: zipfile.ZipFile, meta: dict[str, Any]) -> GaussianCloud:
    n = int(meta["count"])

    def texels(part: str, number: int = 0) -> np.ndarray:
        with Image.open(io.BytesIO(archive.read(meta[part]["files"][number]))) as image:
            return np.asarray(image.convert("RGBA")).reshape(-1, 4)

    def numbers(part: str, rows: np.ndarray) -> np.ndarray:
        return np.array(meta[part]["codebook"], np.float64)[rows]

    low, high = (np.array(meta["means"][end], np.float64) for end in ("mins", "maxs"))
    fixed = texels("means")[:n, :3] + 256.0 * texels("means", 1)[:n, :3]
    places = low + (high - low) * fixed / 65535
    quats, colors = texels("quats")[:n], texels("sh0")[:n]
    if n < 1 or min(len(fixed), len(quats), len(colors)) < n:
        raise ValueError(f"its images hold no {n} Gaussians")
    three = (quats[:, :3] / 255 - 0.5) * np.sqrt(2)
    rest = None
    if "shN" in meta:
        bands, labels = _BANDS[meta["shN"]["bands"]], texels("shN", 1)[:n].astype(np.int64)
        palette = numbers("shN", texels("shN")[:, :3]).reshape(-1, bands, 3)
        rest = palette[labels[:, 0] + 256 * labels[:, 1]]
    return cloud_of(
        path, np.sign(places) * np.expm1(np.abs(places)),
        from_smallest_three(quats[:, 3].astype(np.int64) - _LARGEST, three),
        numbers("scales", texels("scales")[:n, :3]), colors[:, 3] / 255,
        numbers("sh0", colors[:, :3]), rest,
    )  # fmt: skip
