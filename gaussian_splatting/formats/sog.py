# SPDX-License-Identifier: Apache-2.0
"""SOG, PlayCanvas' format for web pages: lossless WebP images of bytes in a ZIP, a texel each.

Positions are sign(x) log(1 + |x|) in 16 bits between a least and a largest number; rotations the
three smallest parts of a quaternion (wxyz) in 8 bits; scales and colours rows of a list of 256
numbers; spherical harmonics rows of a palette whose numbers are such rows. Axes as in a PLY.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.formats.packing import (
    BANDS,
    cloud_of,
    columns,
    from_smallest_three,
    require_gaussians,
    shares,
    sigmoid,
    smallest_three,
)
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.random import generator

# most colours of the palette, and how many lie side by side
_PALETTE = 4096
_ROW = 64
_ROUNDS = 4
_SAMPLES = 16
_CHUNK = 8192
_LARGEST = 252  # of a quaternion's fourth byte if w is its largest part; then x, y, z


def write_sog(path: Path, cloud: GaussianCloud) -> None:
    """Write a ``.sog`` file of version 2, complete or not at all."""
    require_gaussians(path, cloud)
    values = columns(cloud)
    places = np.sign(values["means"]) * np.log1p(np.abs(values["means"]))
    low = places.min(axis=0)
    high = places.max(axis=0)
    fixed = shares((places - low) / np.maximum(high - low, 1e-12), 16)
    scale_book, scales = _rows_of(values["log_scales"])
    color_book, colors = _rows_of(values["sh_dc"][:, 0])
    largest, three = smallest_three(values["quats"])
    quats = np.column_stack([shares(three / np.sqrt(2) + 0.5, 8), largest + _LARGEST])
    opacities = shares(sigmoid(values["opacity_logits"]), 8)
    images = {
        "means_l": fixed & 255,
        "means_u": fixed >> 8,
        "scales": scales,
        "quats": quats,
        "sh0": np.column_stack([colors, opacities]),
    }
    meta: dict[str, Any] = {
        "version": 2,
        "asset": {"generator": "sugar-trainer"},
        "count": len(cloud),
        "antialias": cloud.antialiased,
        "means": {"mins": low.tolist(), "maxs": high.tolist()},
        "scales": {"codebook": scale_book},
        "quats": {},
        "sh0": {"codebook": color_book},
    }
    side = int(np.ceil(np.sqrt(len(cloud))))
    shapes = dict.fromkeys(images, side)
    if values["sh_rest"].any():
        palette, labels = _palette(torch.from_numpy(values["sh_rest"]).flatten(1).float())
        book, rows = _rows_of(palette.numpy())
        images["shN_centroids"] = rows.reshape(-1, 3)
        images["shN_labels"] = np.column_stack([labels & 255, labels >> 8, labels * 0])
        meta["shN"] = {"count": len(palette), "bands": 3, "codebook": book}
        shapes |= {"shN_centroids": _ROW * BANDS[3], "shN_labels": side}
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, texels in images.items():
            meta[name.split("_")[0]].setdefault("files", []).append(f"{name}.webp")
            # Without the time of day, the same Gaussians give the same bytes.
            archive.writestr(zipfile.ZipInfo(f"{name}.webp"), _webp(texels, shapes[name]))
        archive.writestr(zipfile.ZipInfo("meta.json"), json.dumps(meta))


def _webp(texels: np.ndarray, width: int) -> bytes:
    """An image of so many texels in a row; those that are missing at the end are 0."""
    height = -(-len(texels) // width)
    buffer = io.BytesIO()
    image = np.zeros((height * width, texels.shape[1]), np.uint8)
    image[: len(texels)] = texels
    picture = Image.fromarray(image.reshape(height, width, -1))
    picture.save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()


def _rows_of(values: np.ndarray) -> tuple[list[float], np.ndarray]:
    """256 numbers, and for each value the row of the nearest one: means of parts (Lloyd)."""
    ordered = np.sort(values, axis=None).astype(np.float64)
    book = np.quantile(ordered, (np.arange(256) + 0.5) / 256)
    total = np.cumsum([0.0, *ordered])
    for _ in range(_ROUNDS):
        ends = np.searchsorted(ordered, (book[1:] + book[:-1]) / 2)
        ends = np.concatenate([[0], ends, [len(ordered)]])
        counts = np.diff(ends)
        book = np.where(counts > 0, np.diff(total[ends]) / np.maximum(counts, 1), book)
    return book.tolist(), np.searchsorted((book[1:] + book[:-1]) / 2, values)


def _palette(rows: Tensor) -> tuple[Tensor, np.ndarray]:
    """At most so many rows that stand for all (k-means of a sample), and which one for each."""
    order = torch.randperm(len(rows), generator=generator(0, "palette"), device="cpu")
    palette = rows[order[:_PALETTE]]
    sample = rows[order[: _SAMPLES * _PALETTE]]
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
    cloud = cloud_of(
        path,
        np.sign(places) * np.expm1(np.abs(places)),
        from_smallest_three(quats[:, 3].astype(np.int64) - _LARGEST, three),
        numbers("scales", texels("scales")[:n, :3]),
        colors[:, 3] / 255,
        numbers("sh0", colors[:, :3]),
        rest,
    )
    return replace(cloud, antialiased=bool(meta.get("antialias", False)))
