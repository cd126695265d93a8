# SPDX-License-Identifier: Apache-2.0
"""A new export format is one entry of the table and one file with its writer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.formats.ply import write_gaussian_ply
from sugar_extractors.export.export_options import ExportOptions
from sugar_extractors.export.export_run import export
from sugar_extractors.export.format_kinds import GaussianFormat, PointFormat
from sugar_extractors.export.format_types import Axes
from sugar_extractors.export.formats import FORMATS
from sugar_extractors.export_contents import PointExport
from sugar_extractors.placing import PlacementOptions
from tests.support.tiny_scene import tiny_cloud

# What would be the file of the writers.


def write_xyz(points: PointExport) -> None:
    """A line of text for each point."""
    with points.path.open("w", encoding="utf-8") as file:
        np.savetxt(file, points.points.positions + points.offset)


def write_tensors(path: Path, cloud: GaussianCloud) -> None:
    """The tensors of Gaussians, as torch saves them."""
    torch.save(cloud, path)


def read_tensors(path: Path, notify) -> GaussianCloud:
    """Read a file of :func:`write_tensors`."""
    return torch.load(path, weights_only=False)


# What would be the entries of the table.

XYZ = PointFormat(name="xyz", suffix=".xyz", axes=Axes.Y_UP, writer=write_xyz)
TENSORS = GaussianFormat(name="tensors", suffix=".th", writer=write_tensors, reader=read_tensors)


def test_a_format_of_points_gets_flags_names_placement_and_records(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, XYZ.name, XYZ)
    cloud = tiny_cloud(20)
    source = tmp_path / "scan.ply"
    write_gaussian_ply(source, cloud)
    placement = PlacementOptions(scale_factor=2.0)
    options = ExportOptions(source, to="xyz", output=tmp_path / "a", placement=placement)
    assert export(options) == tmp_path / "a.xyz"
    expected = 2 * cloud.means.double().numpy() * (1, -1, -1)
    np.testing.assert_allclose(np.loadtxt(tmp_path / "a.xyz"), expected, rtol=1e-6)
    record = json.loads((tmp_path / "a.xyz.json").read_text(encoding="utf-8"))
    np.testing.assert_allclose(np.diag(np.reshape(record["matrix"], (4, 4))), (2, -2, -2, 1))


def test_a_format_of_gaussians_is_read_back_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(FORMATS, TENSORS.name, TENSORS)
    cloud = tiny_cloud(20)
    source = tmp_path / "scan.ply"
    write_gaussian_ply(source, cloud)
    target = export(ExportOptions(source, to="tensors", output=tmp_path / "a"))
    assert target == tmp_path / "a.th"
    assert torch.equal(read_tensors(target, print).means, cloud.means)
    assert "20 Gaussians; " in capsys.readouterr().out
