# SPDX-License-Identifier: Apache-2.0
"""Orthophotos show each place of the map where it is, at its height."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gaussian_splatting.data.cameras import upright_axes
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_scene.mesh_files.textured_mesh_io import write_textured_mesh
from sugar_viewer import geotiff, orthophoto
from tests.support.survey import EPSG, ORIGIN, SCALE, TO_MAP, list_lines, places, write_list
from tests.support.textured_box import CENTER, HALF_SIDES, box_mesh, color_at
from tests.support.tiny_scene import refusal, run_cli, tiny_cloud
from tests.support.verbs import render
from tests.test_export_placement import Inputs, inputs

__all__ = ["inputs"]
tifffile = pytest.importorskip("tifffile")
PIXEL = 0.25


@pytest.fixture(scope="module")
def gcp(inputs, tmp_path_factory) -> Path:
    """Control points of the tiny scene, without errors."""
    points = places(8)
    lines = list_lines(inputs.scene.cameras, points, TO_MAP.moved(points))
    return write_list(tmp_path_factory.mktemp("survey") / "gcp_list.txt", lines)


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    """A textured box whose colours and sides are known."""
    path = tmp_path_factory.mktemp("box") / "box.obj"
    write_textured_mesh(path, box_mesh(), glb=False)
    return path


class Raster(NamedTuple):
    """An orthophoto, its heights, and the places of the middles of its pixels."""

    picture: np.ndarray  # (H, W, 4)
    heights: np.ndarray  # (H, W)
    x: np.ndarray  # (H, W)
    y: np.ndarray  # (H, W)
    tags: dict


def rendered(inputs: Inputs, result: Path, target: Path, *words) -> Raster:
    words = ("-s", inputs.scene.root, "-o", target, "--gpu", "-1", *words)
    assert run_cli(render.main, result, *words) == 0
    with tifffile.TiffFile(target) as file:
        picture = file.asarray()
        tags = {tag.code: tag.value for tag in file.pages[0].tags}
    heights = tifffile.imread(target.with_name(f"{target.stem}_height.tif"))
    pixel = tags[33550][0]
    left, top = tags[33922][3:5]
    n_rows, n_columns = heights.shape
    x = left + (np.arange(n_columns) + 0.5) * pixel
    y = top - (np.arange(n_rows) + 0.5) * pixel
    return Raster(picture, heights, *np.meshgrid(x, y), tags)


def seen_from_above(raster: Raster) -> tuple[np.ndarray, np.ndarray]:
    """Points of the box that vertical rays meet first, (H, W, 3), NaN where none; and heights."""
    high = np.stack([raster.x, raster.y, np.full(raster.x.shape, ORIGIN[2] + 100)], axis=-1)
    origins = (high - TO_MAP.translation) @ TO_MAP.rotation / SCALE
    direction = -TO_MAP.rotation[2]
    at_low = (CENTER - HALF_SIDES - origins) / direction
    at_high = (CENTER + HALF_SIDES - origins) / direction
    entry = np.minimum(at_low, at_high).max(axis=-1)
    leave = np.maximum(at_low, at_high).min(axis=-1)
    entry = np.where(entry < leave, entry, np.nan)
    return origins + entry[..., None] * direction, high[..., 2] - entry * SCALE


def inner(mask: np.ndarray) -> np.ndarray:
    """Pixels whose neighbours are in the mask, too."""
    padded = np.pad(mask, 1)
    shifts = [np.roll(padded, (dy, dx), (0, 1)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    return np.logical_and.reduce(shifts)[1:-1, 1:-1]


def test_a_mesh_lies_on_the_map_with_its_heights_and_colours(inputs, box, gcp, tmp_path):
    words = ("--ortho", "down", "--gcp", gcp, "--ortho_pixel", PIXEL)
    raster = rendered(inputs, box, tmp_path / "a.tif", *words)
    points, expected = seen_from_above(raster)
    is_box = np.isfinite(expected)
    assert is_box.sum() > 10_000
    is_covered = raster.picture[..., 3] > 0
    assert is_covered[inner(is_box)].all()
    assert not is_covered[inner(~is_box)].any()
    np.testing.assert_array_equal(raster.heights[~is_covered], geotiff.NO_DATA)
    sure = inner(is_box)
    # On the sides of the tilted box a tenth of a pixel is a metre of height.
    errors = np.abs(raster.heights - expected)[sure]
    assert np.quantile(errors, 0.95) < 0.002
    colors = raster.picture[..., :3] / 255
    differences = np.abs(colors - color_at(points))[sure]
    assert np.quantile(differences, 0.95) < 0.03
    assert np.isclose((raster.x[0, 0] - PIXEL / 2) / PIXEL % 1, [0, 1], atol=1e-3).any()


def test_files_of_the_folder_of_results_lie_where_the_others_do(inputs, box, gcp, tmp_path):
    words = ("--ortho", "down", "--gcp", gcp, "--ortho_pixel", PIXEL)
    expected = rendered(inputs, box, tmp_path / "a.tif", *words)
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    made = FinalResults(box, None, lambda: inputs.cloud)
    write_result_folder(tmp_path / "results", made, scene, PlacementOptions(scale_factor=3.0))
    raster = rendered(inputs, tmp_path / "results" / "mesh.obj", tmp_path / "b.tif", *words)
    sure = inner(expected.picture[..., 3] > 0) & inner(raster.picture[..., 3] > 0)
    assert sure.sum() > 10_000
    assert np.quantile(np.abs(raster.heights - expected.heights)[sure], 0.95) < 0.002


def test_the_tags_are_those_that_programs_for_maps_read(inputs, box, gcp, tmp_path):
    words = ("--ortho", "--gcp", gcp, "--ortho_pixel", 1)
    raster = (
        rendered(inputs, box, tmp_path / "a", *words)
        if False
        else rendered(inputs, box, tmp_path / "a.tif", *words)
    )
    keys = np.array(raster.tags[34735]).reshape(-1, 4)
    assert [3072, 0, 1, EPSG] in keys.tolist()
    assert [1024, 0, 1, 1] in keys.tolist()
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(tmp_path / "a_height.tif") as heights:
        assert heights.crs.to_epsg() == EPSG
        assert heights.nodata == geotiff.NO_DATA
        x, y = heights.xy(3, 5)
        assert (x, y) == pytest.approx((raster.x[3, 5], raster.y[3, 5]), abs=1e-6)
        np.testing.assert_array_equal(heights.read(1), raster.heights)
    with rasterio.open(tmp_path / "a.tif") as picture:
        assert picture.count == 4
        assert picture.colorinterp[3].name == "alpha"


def test_gaussians_lie_on_the_map(inputs, gcp, tmp_path):
    source = tmp_path / "ball.ply"
    # So many that no light comes through.
    write_gaussian_ply(source, tiny_cloud(3000))
    words = ("--ortho", "down", "--gcp", gcp, "--ortho_pixel", 0.5)
    raster = rendered(inputs, source, tmp_path / "a.tif", *words)
    is_solid = raster.picture[..., 3] > 200
    middle = np.array([raster.x[is_solid].mean(), raster.y[is_solid].mean()])
    np.testing.assert_allclose(middle, ORIGIN[:2], atol=1.0)
    is_middle = np.hypot(raster.x - ORIGIN[0], raster.y - ORIGIN[1]) < 3
    # The ball has a radius of 1.
    assert np.median(raster.heights[is_middle]) == pytest.approx(ORIGIN[2] + SCALE, abs=2)


@pytest.mark.slow
def test_tiles_join_without_seams(inputs, box, gcp, tmp_path, monkeypatch):
    words = ("--ortho", "down", "--gcp", gcp, "--ortho_pixel", PIXEL)
    at_once = rendered(inputs, box, tmp_path / "a.tif", *words)
    monkeypatch.setattr(orthophoto, "_TILE", 60)
    in_tiles = rendered(inputs, box, tmp_path / "b.tif", *words)
    assert in_tiles.picture.shape == at_once.picture.shape
    sure = inner((at_once.picture[..., 3] > 0) & (in_tiles.picture[..., 3] > 0))
    differences = np.abs(at_once.picture.astype(int) - in_tiles.picture)[sure]
    assert np.quantile(differences, 0.99) <= 3
    assert np.quantile(np.abs(at_once.heights - in_tiles.heights)[sure], 0.95) < 0.002


# The axes of a picture, to the right and upwards, and of its heights, by direction.
DIRECTIONS = {
    "down": ("x", "y", "z"),
    "up": ("x", "-y", "-z"),
    "x+": ("-y", "z", "-x"),
    "x-": ("y", "z", "x"),
    "y+": ("x", "z", "-y"),
    "y-": ("-x", "z", "y"),
}


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_a_map_axes_are_those_of_the_upright_capture(direction, inputs, box, tmp_path):
    words = ("--ortho", direction, "--ortho_pixel", 0.02)
    raster = rendered(inputs, box, tmp_path / "a.tif", *words)
    assert 34735 not in raster.tags
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    to_right, up, to_front = upright_axes(scene.calibrated_cameras, scene.points)
    axes = {"x": to_right, "y": -to_front, "z": up}
    corners = box_mesh().vertices.double().numpy()
    is_covered = raster.picture[..., 3] > 0
    for name, values in zip(
        DIRECTIONS[direction],
        (raster.x[is_covered], raster.y[is_covered], raster.heights[is_covered]),
        strict=True,
    ):
        expected = corners @ axes[name[-1]] * (-1 if name[0] == "-" else 1)
        if name == DIRECTIONS[direction][2]:
            # Only the side that is turned to the viewer is seen.
            assert values.max() == pytest.approx(expected.max(), abs=0.03)
        else:
            assert values.min() == pytest.approx(expected.min(), abs=0.03)
            assert values.max() == pytest.approx(expected.max(), abs=0.03)


def test_orthophotos_that_cannot_be_are_refused(inputs, box, gcp, tmp_path, capsys, monkeypatch):
    def refused(*words) -> str:
        output = ("-s", inputs.scene.root, "-o", tmp_path / "a.tif", "--gpu", "-1")
        error = refusal(capsys, render.main, *words, *output)
        return error

    assert "for --ortho; pass it" in refused(box, "--gcp", gcp)
    assert "for --ortho; pass it" in refused(box, "--ortho_pixel", 1)
    assert "shows one result, not 2" in refused(box, box, "--ortho", "down")
    assert "choose 0.00" in refused(box, "--ortho", "down", "--ortho_pixel", "1e-9")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert "pip install '.[geo]'" in refused(box, "--ortho", "down")
    assert not list(tmp_path.iterdir())
