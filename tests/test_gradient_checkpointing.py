# SPDX-License-Identifier: Apache-2.0
"""Computing things again instead of keeping them: the same bits, with strips and without."""

import gc
import weakref

import pytest
import torch

from gaussian_splatting.engine.stage import COLOR
from gaussian_splatting.engine.strips import ImageSplit, ViewPass
from gaussian_splatting.rasterization import Rasterizer, project, rasterize
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.sampling_block import SurfaceSampler
from sugar_trainers.stage_config import CoarseConfig, CoarseSchedule, RefineConfig
from tests.support.mesh_scenes import icosahedron
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.tiny_scene import disturbed_cloud, tiny_cloud

EXTENT = 3.0
MODES = [("density", True), ("sdf", True), ("dn_consistency", True), ("dn_consistency", False)]


@pytest.fixture
def camera():
    return look_at((2.6, 1.2, 0.7), width=51, height=37, focal=45.0, principal=(2.3, -1.7))


@pytest.fixture
def target(camera):
    with torch.no_grad():
        return rasterize(tiny_cloud().activate(), camera).image.clamp(0, 1)


def step(stage, iteration, camera, target):
    stage.begin(iteration)
    result = stage.accumulate(iteration, camera, target)
    return {**stage.model.optimizer.gradients(), **result.terms, "radii": result.radii}


def coarse_stage(mode, full, split, cloud=None):
    # Both the entropy and the geometric terms act in one iteration.
    schedule = CoarseSchedule(entropy_stop=9_500)
    config = CoarseConfig(mode, schedule, sdf_samples=3_000, full_res_normals=full, split=split)
    return CoarseStage(cloud or disturbed_cloud(tiny_cloud()), config, EXTENT, print)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("iteration", [7_500, 9_100])
@pytest.mark.parametrize("strips", [1, 3])
@pytest.mark.parametrize(("mode", "full"), MODES)
def test_coarse_gradients_have_the_same_bits(mode, full, strips, iteration, camera, target):
    runs = [
        step(coarse_stage(mode, full, ImageSplit(strips, again)), iteration, camera, target)
        for again in (False, True)
    ]
    assert float(runs[0]["means"].abs().max()) > 0
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize("strips", [1, 3])
def test_vanilla_gradients_have_the_same_bits(strips, camera, target, tmp_path):
    runs = []
    for again in (False, True):
        config = VanillaConfig(split=ImageSplit(strips, again))
        stage = VanillaStage(disturbed_cloud(tiny_cloud()), config, EXTENT, tmp_path)
        runs.append({**step(stage, 1, camera, target), **stage.extra_state()})
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize("strips", [1, 3])
def test_refinement_gradients_have_the_same_bits(strips, camera, target):
    mesh, runs = icosahedron(), []
    arrays = [torch.tensor(a) for a in (mesh.vertices, mesh.faces, mesh.colors / 255)]
    for again in (False, True):
        config = RefineConfig(split=ImageSplit(strips, again), sh_interval=1)
        stage = RefineStage(bind_to_mesh(*arrays, 3, EXTENT), config, EXTENT)
        runs.append(step(stage, 4, camera, target))
    assert_equal(runs[1], runs[0])


def test_an_iteration_in_which_nothing_is_seen_has_the_same_bits(camera, target):
    cloud = disturbed_cloud(tiny_cloud())
    cloud.means += torch.tensor([100.0, 0.0, 0.0])
    runs = [
        step(coarse_stage("sdf", True, ImageSplit(2, again), cloud), 9_100, camera, target)
        for again in (False, True)
    ]
    assert not runs[0]["radii"].any()
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize(("again", "kept"), [(True, False), (False, True)])
def test_no_projection_lives_beside_the_samples(again, kept, camera, target, monkeypatch):
    """The flag frees what is as large as the Gaussians while the sampling terms are evaluated."""
    projections, alive = [], []

    def watched(*args, **options):
        projection = project(*args, **options)
        projections.append(weakref.ref(projection.splats))
        return projection

    original = SurfaceSampler.backward

    def backward(self, *args):
        gc.collect()
        alive.append(projections[0]() is not None)
        return original(self, *args)

    monkeypatch.setattr("sugar_trainers.coarse_stage.project", watched)
    monkeypatch.setattr(SurfaceSampler, "backward", backward)
    step(coarse_stage("sdf", True, ImageSplit(2, again)), 9_100, camera, target)
    assert alive == [kept]
    assert len(projections) == (2 if again else 1)


def test_each_strip_is_blended_twice(camera, target, monkeypatch):
    rows, original = [], Rasterizer.blend_rows

    def counted(splats, tiles, background, which, **kernels):
        rows.append(which)
        return original(splats, tiles, background, which, **kernels)

    monkeypatch.setattr(Rasterizer, "blend_rows", staticmethod(counted))
    leaves = random_gaussians(200, 5, torch.float32).as_leaves()
    for again in (False, True):
        rows.clear()
        view = ViewPass(lambda: project(leaves, camera), None, ImageSplit(3, again))
        view.backpropagate([COLOR.bind(camera, target)])
        assert len(rows) == (6 if again else 3)
        assert len(set(rows)) == 3
