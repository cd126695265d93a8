# SPDX-License-Identifier: Apache-2.0
"""SOG, PlayCanvas' format for web pages: lossless WebP images in a ZIP, one texel per Gaussian.

Positions are sign(x) log(1 + |x|) in 16 bits between a least and a largest number; rotations the
three smallest parts of a quaternion (wxyz) in 8 bits; scales and colours indices into a codebook of
256 numbers; spherical harmonics indices into a palette, whose numbers are such indices. Axes as in
a PLY.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.random import generator
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.formats.packing import (
    BANDS,
    Columns,
    cloud_of,
    columns,
    from_smallest_three,
    require_gaussians,
    shares,
    sigmoid,
    smallest_three,
)
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import atomic_path, require_regular_file

META = "meta.json"
"""Name of the file that describes the images."""

_PALETTE = 4096  # most rows of the palette of spherical harmonics
_PALETTE_COLUMNS = 64  # rows of the palette that lie side by side
_CODEBOOK = 256  # numbers of a codebook
_ROUNDS = 4  # of Lloyd's algorithm
_SAMPLES = 16  # rows of the sample for each row of the palette
_CHUNK = 8192  # rows that are compared with the palette at once
_LARGEST = 252  # of a quaternion's fourth byte if w is its largest part; then x, y, z


class _Texels(NamedTuple):
    """The content of an image."""

    values: np.ndarray  # (N, C) bytes
    width: int


class _Quantized(NamedTuple):
    """Numbers as indices into a codebook."""

    codebook: list[float]  # 256 numbers
    indices: np.ndarray  # in the shape of the numbers


class _Palette(NamedTuple):
    """Rows that stand for others."""

    rows: Tensor  # (P, 45) float32
    labels: np.ndarray  # index of the row that stands for each Gaussian, (N,)


def write_sog(path: Path, cloud: GaussianCloud) -> None:
    """Write a ``.sog`` file of version 2, complete or not at all."""
    require_gaussians(path, cloud)
    files = sog_files(cloud)
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in files.items():
            # Without the time of day, the same Gaussians give the same bytes.
            archive.writestr(zipfile.ZipInfo(name), content)


def sog_files(cloud: GaussianCloud) -> dict[str, bytes]:
    """Return the files of version 2 by name, ``meta.json`` last."""
    values = columns(cloud)
    side = int(np.ceil(np.sqrt(len(cloud))))
    positions = np.sign(values["means"]) * np.log1p(np.abs(values["means"]))
    low = positions.min(axis=0)
    high = positions.max(axis=0)
    fixed = shares((positions - low) / np.maximum(high - low, 1e-12), 16)
    scales = _quantize(values["log_scales"])
    colors = _quantize(values["sh_dc"][:, 0])
    opacities = shares(sigmoid(values["opacity_logits"]), 8)
    images = {
        "means_l": _Texels(fixed & 255, side),
        "means_u": _Texels(fixed >> 8, side),
        "scales": _Texels(scales.indices, side),
        "quats": _Texels(_pack_quaternions(values["quats"]), side),
        "sh0": _Texels(np.column_stack([colors.indices, opacities]), side),
    }
    meta: dict[str, Any] = {
        "version": 2,
        "asset": {"generator": "sugar-trainer"},
        "count": len(cloud),
        "antialias": cloud.antialiased,
        "means": {"mins": low.tolist(), "maxs": high.tolist()},
        "scales": {"codebook": scales.codebook},
        "quats": {},
        "sh0": {"codebook": colors.codebook},
    }
    if values["sh_rest"].any():
        _add_harmonics(images, meta, values["sh_rest"], side)
    files = {}
    for name, texels in images.items():
        section = meta[name.split("_")[0]]
        section.setdefault("files", []).append(f"{name}.webp")
        files[f"{name}.webp"] = _webp(texels)
    files[META] = json.dumps(meta).encode()
    return files


def _add_harmonics(
    images: dict[str, _Texels], meta: dict[str, Any], sh_rest: np.ndarray, side: int
) -> None:
    """Add the images and the entry of spherical harmonics. sh_rest: (N, 15, 3)"""
    palette = _make_palette(torch.from_numpy(sh_rest).flatten(1).float())
    quantized = _quantize(palette.rows.numpy())
    labels = palette.labels
    palette_width = _PALETTE_COLUMNS * BANDS[3]
    images["shN_centroids"] = _Texels(quantized.indices.reshape(-1, 3), palette_width)
    label_bytes = np.column_stack([labels & 255, labels >> 8, np.zeros_like(labels)])
    images["shN_labels"] = _Texels(label_bytes, side)
    meta["shN"] = {"count": len(palette.rows), "bands": 3, "codebook": quantized.codebook}


def _pack_quaternions(quats: np.ndarray) -> np.ndarray:
    """Return the three smallest parts and the code of the largest one. (N, 4) -> (N, 4)"""
    largest, three = smallest_three(quats)
    return np.column_stack([shares(three / np.sqrt(2) + 0.5, 8), largest + _LARGEST])


def _webp(texels: _Texels) -> bytes:
    """Encode an image; texels that are missing at the end of its last row are 0."""
    n, n_channels = texels.values.shape
    height = -(-n // texels.width)
    pixels = np.zeros((height * texels.width, n_channels), np.uint8)
    pixels[:n] = texels.values
    picture = Image.fromarray(pixels.reshape(height, texels.width, -1))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()


def _quantize(values: np.ndarray) -> _Quantized:
    """Choose a codebook by Lloyd's algorithm, and the nearest number of it for each value."""
    ordered = np.sort(values, axis=None).astype(np.float64)
    codebook = np.quantile(ordered, (np.arange(_CODEBOOK) + 0.5) / _CODEBOOK)
    cumulative_sums = np.cumsum([0.0, *ordered])
    for _ in range(_ROUNDS):
        inner_ends = np.searchsorted(ordered, (codebook[1:] + codebook[:-1]) / 2)
        ends = np.concatenate([[0], inner_ends, [len(ordered)]])
        counts = np.diff(ends)
        means = np.diff(cumulative_sums[ends]) / np.maximum(counts, 1)
        codebook = np.where(counts > 0, means, codebook)
    indices = np.searchsorted((codebook[1:] + codebook[:-1]) / 2, values)
    return _Quantized(codebook.tolist(), indices)


def _make_palette(rows: Tensor) -> _Palette:
    """Choose rows that stand for all, by k-means of a sample. (N, 45)"""
    order = torch.randperm(len(rows), generator=generator(0, "palette"), device="cpu")
    palette = rows[order[:_PALETTE]]
    sample = rows[order[: _SAMPLES * _PALETTE]]
    n_rounds = _ROUNDS if len(sample) > len(palette) else 0
    for _ in range(n_rounds):
        nearest = _nearest(sample, palette)
        counts = torch.bincount(nearest, minlength=len(palette))[:, None]
        sums = torch.zeros_like(palette).index_add_(0, nearest, sample)
        palette = torch.where(counts > 0, sums / counts.clamp(min=1), palette)
    return _Palette(palette, _nearest(rows, palette).numpy())


def _nearest(rows: Tensor, palette: Tensor) -> Tensor:
    """Return the index of the nearest row of a palette. (N, C), (P, C) -> (N,)"""
    parts = rows.split(_CHUNK)
    return torch.cat([torch.cdist(part, palette).argmin(dim=1) for part in parts])


def read_sog(path: Path, notify: Notify = print) -> GaussianCloud:
    """Read a ``.sog`` file of version 2."""
    with _explained(path), zipfile.ZipFile(require_regular_file(path)) as archive:
        return _cloud_of_files(path, archive.read(META), archive.read, notify)


def _refuse(line: str) -> None:
    raise UserError(f"{line}; export it again")


def read_sog_folder(path: Path, notify: Notify = _refuse) -> GaussianCloud:
    """Read the files of version 2 that are not packed, by the path of their ``meta.json``.

    Args:
        notify: Called where rows are dropped. An index counts the rows of its folders, so that
            dropped ones are refused if it is not given.
    """
    with _explained(path):
        description = require_regular_file(path).read_bytes()
        # A name is what the file says, and may not lead out of its folder.
        return _cloud_of_files(
            path, description, lambda name: (path.parent / Path(name).name).read_bytes(), notify
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert exceptions from malformed content into an error that names the file."""
    try:
        yield
    except (*IMAGE_ERRORS, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: damaged, or no SOG file ({reason_of(error)}); export it again"
        ) from error


def _cloud_of_files(
    path: Path, description: bytes, content_of: Callable[[str], bytes], notify: Notify
) -> GaussianCloud:
    """Build the cloud; malformed content raises one of ``IMAGE_ERRORS``.

    Args:
        path: For the message of an error.
        description: Content of ``meta.json``.
        content_of: Returns the content of an image by its name.
    """
    meta = json.loads(description)
    if meta["version"] != 2:
        raise ValueError(f"version {meta['version']}, not 2")
    n = int(meta["count"])

    def texels(part: str, number: int = 0) -> np.ndarray:
        """Decode an image of a part. (N, 4) uint8"""
        with Image.open(io.BytesIO(content_of(meta[part]["files"][number]))) as image:
            return np.asarray(image.convert("RGBA")).reshape(-1, 4)

    def numbers(part: str, indices: np.ndarray) -> np.ndarray:
        """Look indices up in the codebook of a part."""
        codebook = np.array(meta[part]["codebook"], np.float64)
        return codebook[indices]

    low = np.array(meta["means"]["mins"], np.float64)
    high = np.array(meta["means"]["maxs"], np.float64)
    fixed = texels("means")[:n, :3] + 256.0 * texels("means", 1)[:n, :3]
    positions = low + (high - low) * fixed / 65535
    quats = texels("quats")[:n]
    colors = texels("sh0")[:n]
    if n < 1 or min(len(fixed), len(quats), len(colors)) < n:
        raise ValueError(f"its images hold no {n} Gaussians")
    three = (quats[:, :3] / 255 - 0.5) * np.sqrt(2)
    rest = None
    if "shN" in meta:
        bands = BANDS[meta["shN"]["bands"]]
        labels = texels("shN", 1)[:n].astype(np.int64)
        palette = numbers("shN", texels("shN")[:, :3]).reshape(-1, bands, 3)
        rest = palette[labels[:, 0] + 256 * labels[:, 1]]
    largest = quats[:, 3].astype(np.int64) - _LARGEST
    values = Columns(
        means=np.sign(positions) * np.expm1(np.abs(positions)),
        quats=from_smallest_three(largest, three),
        log_scales=numbers("scales", texels("scales")[:n, :3]),
        opacities=colors[:, 3] / 255,
        sh_dc=numbers("sh0", colors[:, :3]),
        sh_rest=rest,
    )
    cloud = cloud_of(path, values, notify)
    return replace(cloud, antialiased=bool(meta.get("antialias", False)))
