# SPDX-License-Identifier: Apache-2.0
"""Files of Gaussians in the layouts of other programs, which are read but not written."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from plyfile import PlyData, PlyElement

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb

CHUNK = 256


def random_cloud(n: int = 600) -> GaussianCloud:
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    return GaussianCloud(
        means=normal(n, 3) * 2,
        sh_dc=normal(n, 1, 3).clamp(-1.5, 1.5),
        sh_rest=(normal(n, 15, 3) * 0.3).clamp(-3, 3),
        opacity_logits=normal(n, 1) * 2,
        log_scales=normal(n, 3) - 4,
        quats=normal(n, 4),
    )


def packed(shares: np.ndarray, bits: tuple[int, ...]) -> np.ndarray:
    """Numbers of 32 bits of shares in [0, 1], (N, K), the first in the highest bits. (N,) uint32"""
    total = np.zeros(len(shares), np.uint64)
    for column, width in enumerate(bits):
        most = (1 << width) - 1
        whole = np.rint(shares[:, column] * most).astype(np.uint64)
        total = (total << np.uint64(width)) | whole
    return total.astype(np.uint32)


def packed_quats(quats: np.ndarray) -> np.ndarray:
    unit = quats / np.linalg.norm(quats, axis=1, keepdims=True)
    largest = np.abs(unit).argmax(axis=1)
    numbers = []
    for quat, place in zip(unit, largest, strict=True):
        others = np.delete(quat * np.sign(quat[place]), place)
        rows = (others / np.sqrt(2) + 0.5)[None]
        numbers.append((int(place) << 30) | int(packed(rows, (10, 10, 10))[0]))
    return np.array(numbers, np.uint32)


def write_compressed(
    path: Path, cloud: GaussianCloud, bands: int = 0, colors_in_chunks: bool = True
) -> None:
    """Write the layout of SuperSplat; ``bands`` of spherical harmonics."""
    n = len(cloud)
    places = {"": cloud.means.numpy(), "scale_": cloud.log_scales.numpy()}
    colors = sh_to_rgb(cloud.sh_dc[:, 0]).numpy()
    bounds, shares = {}, {}
    chunk_of = np.arange(n) // CHUNK
    for prefix, values in {**places, "colors": colors}.items():
        names = "rgb" if prefix == "colors" else [f"{prefix}{axis}" for axis in "xyz"]
        low = np.stack([values[chunk_of == k].min(axis=0) for k in range(chunk_of[-1] + 1)])
        high = np.stack([values[chunk_of == k].max(axis=0) for k in range(chunk_of[-1] + 1)])
        if prefix == "colors" and not colors_in_chunks:
            shares[prefix] = values.clip(0, 1)
            continue
        shares[prefix] = (values - low[chunk_of]) / (high - low)[chunk_of]
        for number, name in enumerate(names):
            bounds[f"min_{name}"] = low[:, number]
            bounds[f"max_{name}"] = high[:, number]
    opacity = torch.sigmoid(cloud.opacity_logits).numpy()
    vertices = {
        "packed_position": packed(shares[""], (11, 10, 11)),
        "packed_rotation": packed_quats(cloud.quats.numpy()),
        "packed_scale": packed(shares["scale_"], (11, 10, 11)),
        "packed_color": packed(np.concatenate([shares["colors"], opacity], axis=1), (8,) * 4),
    }
    elements = {"chunk": bounds, "vertex": vertices}
    if bands:
        rest = cloud.sh_rest[:, : (bands + 1) ** 2 - 1].transpose(1, 2).flatten(1).numpy()
        whole = np.clip(np.trunc((rest / 8 + 0.5) * 256), 0, 255).astype(np.uint8)
        elements["sh"] = {f"f_rest_{k}": whole[:, k] for k in range(whole.shape[1])}
    described = []
    for name, columns in elements.items():
        kinds = [(key, "<f4" if name == "chunk" else v.dtype) for key, v in columns.items()]
        table = np.zeros(len(next(iter(columns.values()))), kinds)
        for key, values in columns.items():
            table[key] = values
        described.append(PlyElement.describe(table, name))
    PlyData(described).write(str(path))


def with_records(path: Path, records: bytes) -> None:
    """Put extension records into a file of version 3 or 4."""
    content = path.read_bytes()
    if content[:4] == b"NGSP":
        head = bytearray(content[:32])
        head[14] |= 2
        head[16:20] = struct.pack("<I", 32 + len(records))
        path.write_bytes(bytes(head) + records + content[32:])
        return
    plain = bytearray(gzip.decompress(content))
    plain[14] |= 2
    path.write_bytes(gzip.compress(bytes(plain) + records))


def record(kind: int, payload: bytes) -> bytes:
    """An extension record of an SPZ file."""
    return struct.pack("<II", kind, len(payload)) + payload
