# SPDX-License-Identifier: Apache-2.0
"""Choices of the program where a flag says auto."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gaussian_splatting.rasterization import rasterize
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.mesh_config import MOST_POINTS, MeshOptions
from sugar_extractors.mesh.meshing_backends import PoissonConfig
from sugar_extractors.mesh.surface_sizes import MOST_DEPTH, automatic_depth, pixel_size
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_trainers.coarse_run import CoarseOptions
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.stage_config import MOST_SAMPLES, CoarseConfig
from sugar_utils.flags import AUTO
from tests.support.command_words import parse
from tests.support.extractions import brief_extraction
from tests.support.mesh_scenes import cameras_around, sphere_cloud, write_mesh_scene
from tests.support.random_scenes import look_at
from tests.support.samples import draw_samples
from tests.support.tiny_scene import disturbed_cloud, tiny_cloud
from tests.support.training import accumulate, everywhere


def cube_points(n: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (n, 3)).astype(np.float32)


@pytest.mark.parametrize("mode", ["density", "sdf", "dn_consistency"])
def test_each_gaussian_that_may_be_drawn_gets_four_points(mode):
    drawn = []

    def draw(mask, n, iteration):
        drawn.append((int(mask.sum()), n))
        return draw_samples(mask, n, seed=iteration)

    # The camera looks past a part of the cloud.
    camera = look_at((1.2, 0.6, 0.4), width=32, height=24, focal=60.0)
    stage = CoarseStage(
        disturbed_cloud(tiny_cloud()),
        CoarseConfig(mode, sdf_samples=AUTO),
        everywhere(3.0),
        print,
        sample_source=draw,
    )
    with torch.no_grad():
        photograph = rasterize(tiny_cloud().activate(), camera).image.clamp(0, 1)
    stage.begin(9_101)
    accumulate(stage, 9_101, camera, photograph)
    ((n_candidates, n_samples),) = drawn
    assert 0 < n_candidates < len(tiny_cloud())
    assert n_samples == 4 * n_candidates


def test_more_points_than_the_reference_draws_are_never_drawn():
    assert CoarseConfig(sdf_samples=AUTO).samples_for(10**9) == MOST_SAMPLES
    assert CoarseConfig(sdf_samples=77).samples_for(10**9) == 77


def test_surface_points_follow_the_triangles_that_are_kept(tmp_path):
    options = MeshOptions(
        scene_path=tmp_path,
        checkpoint_path=tmp_path,
        surface_points=AUTO,
        decimation_targets=(1_000, 20_000),
    )
    assert options.n_surface_points == 200_000
    many = MeshOptions(scene_path=tmp_path, checkpoint_path=tmp_path, surface_points=AUTO)
    assert many.n_surface_points == MOST_POINTS


def test_a_mesh_of_more_surface_points_for_a_larger_target_is_another_mesh(tmp_path):
    def identity(*targets: int) -> dict:
        options = MeshOptions(
            scene_path=tmp_path,
            checkpoint_path=tmp_path,
            surface_points=AUTO,
            decimation_targets=targets,
        )
        return options.identity(0.3, 20_000)

    assert identity(20_000) == identity(10_000, 20_000)
    assert identity(20_000) != identity(20_000, 50_000)
    assert identity(20_000)["surface_points"] == AUTO


def test_cells_are_no_smaller_than_pixels_and_no_emptier_than_a_point_each():
    points = cube_points(1_000_000)
    depths = [automatic_depth(points, pixel) for pixel in (0.5, 0.25, 0.125, 0.06, 1e-9)]
    assert depths == [4, 4, 5, 6, 9]
    # 2.2 wide: 2^6 cells of 0.034 are finer than the pixel, 2^5 are not.
    assert [automatic_depth(points[:n], 1e-9) for n in (4_000, 16_000, 64_000)] == [5, 6, 7]
    assert automatic_depth(points[:1], 1e-9) == 4
    assert automatic_depth(np.repeat(points, 4, axis=0), 0.0) == MOST_DEPTH


def test_a_pixel_is_measured_in_the_nearest_view():
    near = look_at((2.0, 0.0, 0.0), width=32, height=24, focal=50.0)
    far = look_at((9.0, 0.0, 0.0), width=32, height=24, focal=50.0)
    points = np.zeros((3, 3), dtype=np.float32)
    assert pixel_size(points, [far, near]) == pytest.approx(2.0 / 50.0, rel=1e-6)


@pytest.mark.slow
def test_a_sphere_comes_back_with_what_was_chosen(tmp_path):
    made = write_mesh_scene(tmp_path, sphere_cloud(), cameras_around())
    options = brief_extraction(
        made,
        tmp_path / "meshes",
        surface_points=AUTO,
        poisson=PoissonConfig(poisson_depth=AUTO),
    )
    (path,) = extract_coarse_mesh(options)
    kept = json.loads(path.with_suffix(".json").read_text())
    assert kept["result"]["foreground_depth"] == 6
    assert 30_000 < kept["result"]["surface_points"] < 46_000
    radius = np.linalg.norm(read_mesh_ply(path).vertices, axis=1)
    assert abs(np.median(radius) - 1.03) < 0.03
    assert radius.std() < 0.02


@pytest.mark.parametrize("wrong", ["automatic", "0", "-3", "1.5", ""])
def test_other_words_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(CoarseOptions, ["-s", "x", "-c", "y", "--sdf_samples", wrong])
    assert stopped.value.code == 2
    assert "--sdf_samples" in capsys.readouterr().err
