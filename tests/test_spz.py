# SPDX-License-Identifier: Apache-2.0
"""SPZ files: what they cannot hold is refused or said, and extension records are read."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.formats.spz import AXES, read_spz, write_spz
from sugar_extractors.export.export_run import ExportOptions, export
from sugar_extractors.export.reading import open_gaussians
from sugar_extractors.placing import PlacementOptions
from sugar_utils.errors import UserError
from tests.support.gaussian_files import record, with_records
from tests.support.heard_console import Heard
from tests.test_compact_files import random_cloud

ORBIT = 0xADBE0002
ALL_AXES = ["RUB", "RDF", "LUF", "RUF", "LDB", "RFU", "LBD"]
NUMBERS = {"RUB": 4, "RDF": 6, "LUF": 7, "RUF": 8, "LDB": 1, "RFU": 12, "LBD": 13}
LETTERS = {
    "R": [1, 0, 0],
    "L": [-1, 0, 0],
    "U": [0, 1, 0],
    "D": [0, -1, 0],
    "B": [0, 0, 1],
    "F": [0, 0, -1],
}


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("axes", ALL_AXES)
def test_axes_that_a_file_names_are_those_of_its_gaussians(tmp_path, version, axes):
    """Also those of the other hand."""
    cloud = random_cloud()
    to_format = np.eye(4)
    to_format[:3, :3] = np.array([LETTERS[letter] for letter in axes], float).T
    write_spz(tmp_path / "a.spz", moved_cloud(cloud, np.linalg.inv(to_format)), version)
    with_records(tmp_path / "a.spz", record(AXES, struct.pack("<I", NUMBERS[axes])))
    found = read_spz(tmp_path / "a.spz", pytest.fail)
    errors = fidelity(cloud, found)
    assert errors.position < 2e-6
    assert errors.rotation < 0.3
    assert errors.harmonics < 0.05


@pytest.mark.parametrize("version", [3, 4])
def test_records_that_are_not_used_are_named(tmp_path, version):
    cloud = random_cloud(20)
    path = tmp_path / "a.spz"
    write_spz(path, cloud, version)
    plain = read_spz(path)
    unused = record(ORBIT, bytes(12)) + record(0x12340001, b"abc") + record(AXES, bytes(4))
    with_records(path, unused)
    notes = []
    found = read_spz(path, notes.append)
    assert torch.equal(found.means, plain.means)
    (note,) = notes
    assert "left out the extension records SPZ_ADOBE_safe_orbit_camera, 0x12340001" in note
    write_spz(path, cloud, version)
    with_records(path, record(AXES, struct.pack("<I", 99)) + b"cut")
    read_spz(path, notes.append)
    assert "axes that are not known (99)" in notes[-1]


def test_a_mirrored_cloud_looks_mirrored():
    cloud = random_cloud(30)
    mirror = np.diag([2.0, -2.0, 2.0, 1.0])
    moved = moved_cloud(cloud, mirror)
    assert torch.allclose(moved.means, cloud.means * torch.tensor([2.0, -2.0, 2.0]))
    back = moved_cloud(moved, np.linalg.inv(mirror))
    assert fidelity(cloud, back).rotation < 0.1
    torch.testing.assert_close(back.sh_rest, cloud.sh_rest, atol=1e-5, rtol=0)
    # Band 1 is a vector along y, z and x, of which the mirror turns y around.
    signs = torch.tensor([-1.0, 1.0, 1.0])[:, None]
    flipped = moved_cloud(cloud, np.diag([1.0, -1.0, 1.0, 1.0]))
    torch.testing.assert_close(
        flipped.sh_rest[:, :3], cloud.sh_rest[:, :3] * signs, atol=1e-5, rtol=0
    )


def scaled(cloud: GaussianCloud, factor: float) -> GaussianCloud:
    return moved_cloud(cloud, np.diag([factor, factor, factor, 1.0]))


def exported(cloud: GaussianCloud, folder, **options) -> tuple[GaussianCloud, list[str]]:
    write_gaussian_ply(folder / "in.ply", cloud)
    console = Heard()
    chosen = ExportOptions(folder / "in.ply", "spz", folder / "out.spz", **options)
    export(chosen, console)
    return open_gaussians(folder / "out.spz", pytest.fail)[0], console.lines


def test_a_small_scene_is_refused_with_the_scale_that_it_needs(tmp_path):
    cloud = scaled(random_cloud(), 1e-4)
    with pytest.raises(UserError, match=r"thinner than SPZ can say .* pass --scale_factor 1000"):
        exported(cloud, tmp_path)
    assert not (tmp_path / "out.spz").exists()
    larger = PlacementOptions(scale_factor=1000.0)
    found, lines = exported(cloud, tmp_path, placement=larger)
    assert fidelity(scaled(cloud, 1000), found).scale < 0.04
    assert not [line for line in lines if line.startswith("note")]


def test_positions_of_a_small_scene_have_all_the_bits_there_are(tmp_path):
    cloud = random_cloud()
    cloud = replace(cloud, means=cloud.means * 1e-3)
    found, _ = exported(cloud, tmp_path)
    assert fidelity(cloud, found).position < 1e-7


@pytest.mark.parametrize(("factor", "refused"), [(1e6, False), (1e7, True)])
def test_positions_beyond_the_range_are_refused_and_coarse_ones_said(tmp_path, factor, refused):
    cloud = random_cloud()
    cloud = replace(cloud, means=cloud.means + torch.tensor([factor, 0.0, 0.0]))
    if refused:
        with pytest.raises(UserError, match=r"positions reach 1e\+07 units, SPZ holds up to 8,388"):
            exported(cloud, tmp_path)
        return
    _, lines = exported(cloud, tmp_path)
    assert any("SPZ rounds positions to 0.12 units" in line for line in lines)


def test_gaussians_too_large_for_the_format_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"larger than SPZ can say \(379 units\); pass --scale"):
        exported(scaled(random_cloud(), 1e5), tmp_path)


def test_a_few_tiny_gaussians_are_counted_and_do_not_hide_how_exact_the_others_are(tmp_path):
    cloud = random_cloud()
    cloud.log_scales[:5] = -14.0
    found, lines = exported(cloud, tmp_path)
    assert len(found) == len(cloud)
    assert any("5 of 600 Gaussians have axes beyond what SPZ can say" in line for line in lines)
    (errors,) = [line for line in lines if "largest errors" in line]
    size = float(errors.split("size ")[1].split("%")[0])
    assert size < 3.3
