# SPDX-License-Identifier: Apache-2.0
"""PLY files of Gaussians in the layouts of other programs: compressed, and with plain colours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plyfile import PlyData, PlyElement

from gaussian_splatting.core.cloud import OPAQUE_LOGIT, rotation_matrices
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.ply import (
    holds_gaussians,
    read_gaussian_ply,
    write_gaussian_ply,
    write_point_ply,
)
from sugar_extractors.export.export_run import ExportOptions, export
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_utils.errors import UserError
from tests.support.gaussian_files import random_cloud, write_compressed
from tests.support.heard_console import Heard


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
    assert len(read_gaussians_in_scene(tmp_path / "b.splat", pytest.fail)) == 600


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
        "_points": cloud.means,
        "all_densities": cloud.opacity_logits,
        "_scales": cloud.log_scales,
        "_quaternions": cloud.quats,
        "_sh_coordinates_dc": cloud.sh_dc,
        "_sh_coordinates_rest": cloud.sh_rest,
    }
    assert torch.equal(cloud_from_state(state).opacity_logits, read.opacity_logits)
