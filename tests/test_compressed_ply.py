# SPDX-License-Identifier: Apache-2.0
"""PLY files of Gaussians in the layouts of other programs: compressed, and with plain colours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plyfile import PlyData, PlyElement

from gaussian_splatting.cloud import OPAQUE_LOGIT, GaussianCloud, rotation_matrices
from gaussian_splatting.data.ply import (
    holds_gaussians,
    read_gaussian_ply,
    write_gaussian_ply,
    write_point_ply,
)
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from sugar_extractors.export.export_run import ExportOptions, export, read_any_gaussians
from sugar_utils.errors import UserError
from tests.support.heard_console import Heard

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


@pytest.mark.parametrize("bands", [0, 1, 2, 3])
@pytest.mark.parametrize("colors_in_chunks", [True, False])
def test_a_compressed_file_reads_as_what_was_packed(tmp_path, bands, colors_in_chunks):
    cloud = random_cloud()
    path = tmp_path / "a.compressed.ply"
    write_compressed(path, cloud, bands, colors_in_chunks)
    assert holds_gaussians(path)
    found = read_gaussian_ply(path, pytest.fail)
    assert (found.means - cloud.means).abs().max() < 0.5 * 16 / 1023
    assert (found.log_scales - cloud.log_scales).abs().max() < 0.5 * 8 / 1023
    turns = [rotation_matrices(c.activate().quats) for c in (found, cloud)]
    assert (turns[0] - turns[1]).abs().max() < 4e-3
    opacities = [torch.sigmoid(c.opacity_logits) for c in (found, cloud)]
    assert (opacities[0] - opacities[1]).abs().max() < 0.51 / 255
    colors = [sh_to_rgb(c.sh_dc) for c in (found, cloud)]
    assert (colors[0] - colors[1]).abs().max() < 0.51 / 255
    n_bands = (bands + 1) ** 2 - 1
    if n_bands:
        assert (found.sh_rest - cloud.sh_rest)[:, :n_bands].abs().max() < 8.01 / 512
    assert not found.sh_rest[:, n_bands:].any()


def test_numbers_of_a_compressed_file_stand_for_the_ends_of_their_range(tmp_path):
    """Opacity 255 is 1 and 0 is 0; bytes 0, 128 and 255 of harmonics are -4, 1/64 and 4."""
    cloud = random_cloud(3)
    cloud.opacity_logits[:, 0] = torch.tensor([99.0, -99.0, 0.0])
    cloud.sh_rest[:, 0, 0] = torch.tensor([-9.0, 9.0, 0.0])
    write_compressed(tmp_path / "a.ply", cloud, 1)
    found = read_gaussian_ply(tmp_path / "a.ply")
    assert found.opacity_logits[:2, 0].tolist() == [OPAQUE_LOGIT, -OPAQUE_LOGIT]
    assert found.sh_rest[:, 0, 0].tolist() == [-4.0, 4.0, 1 / 64]


def test_a_compressed_file_can_be_exported(tmp_path):
    write_compressed(tmp_path / "a.compressed.ply", random_cloud())
    export(ExportOptions(tmp_path / "a.compressed.ply", "splat", tmp_path / "b"), Heard())
    assert len(read_any_gaussians(tmp_path / "b.splat", pytest.fail)) == 600


def test_a_compressed_file_that_is_cut_or_lacks_chunks_is_one_line(tmp_path):
    write_compressed(tmp_path / "a.ply", random_cloud())
    whole = (tmp_path / "a.ply").read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "few chunks": whole.replace(b"element chunk 3", b"element chunk 2"),
        "a column": whole.replace(b"max_scale_y", b"max_scale_q"),
    }
    for content in damaged.values():
        (tmp_path / "b.ply").write_bytes(content)
        with pytest.raises(UserError, match=r"b\.ply") as caught:
            read_gaussian_ply(tmp_path / "b.ply")
        assert "\n" not in str(caught.value)


def test_colours_stand_for_coefficients(tmp_path):
    cloud = replace(random_cloud(20), sh_rest=torch.zeros(20, 15, 3))
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    vertices = PlyData.read(str(tmp_path / "a.ply"))["vertex"].data
    kept = [n for n in vertices.dtype.names if not n.startswith(("f_", "n"))]
    colors = (sh_to_rgb(cloud.sh_dc[:, 0]).clamp(0, 1) * 255).round().numpy().astype(np.uint8)
    table = np.zeros(20, [(n, "<f4") for n in kept] + [(n, "u1") for n in ("red", "green", "blue")])
    for name in kept:
        table[name] = vertices[name]
    for number, name in enumerate(("red", "green", "blue")):
        table[name] = colors[:, number]
    PlyData([PlyElement.describe(table, "vertex")]).write(str(tmp_path / "b.ply"))
    assert holds_gaussians(tmp_path / "b.ply")
    found = read_gaussian_ply(tmp_path / "b.ply", pytest.fail)
    assert torch.equal(found.log_scales, cloud.log_scales)
    assert (sh_to_rgb(found.sh_dc[:, 0]) * 255 - torch.from_numpy(colors)).abs().max() < 1e-4
    # Points have colours as well, but no sizes.
    write_point_ply(tmp_path / "points.ply", np.zeros((2, 3)), np.zeros((2, 3), np.uint8))
    assert not holds_gaussians(tmp_path / "points.ply")


def test_infinite_logits_are_opaque_and_transparent_gaussians(tmp_path):
    cloud = random_cloud(6)
    cloud.opacity_logits[:3, 0] = torch.tensor([torch.inf, -torch.inf, 40.0])
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    read = read_gaussian_ply(tmp_path / "a.ply", pytest.fail)
    assert read.opacity_logits[:3, 0].tolist() == [OPAQUE_LOGIT, -OPAQUE_LOGIT, 40.0]
    opacities = read.activate().opacities
    assert 1 - 1e-6 < float(opacities[0]) < 1
    assert 0 < float(opacities[1]) < 1e-6
    state = {
        "_points": cloud.means, "all_densities": cloud.opacity_logits,
        "_scales": cloud.log_scales, "_quaternions": cloud.quats,
        "_sh_coordinates_dc": cloud.sh_dc, "_sh_coordinates_rest": cloud.sh_rest,
    }  # fmt: skip
    assert torch.equal(cloud_from_state(state).opacity_logits, read.opacity_logits)
