# SPDX-License-Identifier: Apache-2.0
"""Every stage on a device that is not the host: nothing is made without a place or mixed up.

There is no second device on most machines, so one is pretended; see ``pretend_device``.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import train_full_pipeline
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.rasterization import compute
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.meshing_backends import PoissonConfig
from sugar_extractors.texture.texturing import TextureOptions, extract_textured_mesh
from sugar_pipeline.quality.model_metrics import MetricsOptions, measure
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.reprojection import NeighborRule, NeighborViews
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.multiview_stage import MultiviewStage
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, CoarseSchedule, MultiviewConfig, RefineConfig
from sugar_trainers.view_comparison import ComparisonRule, ViewComparer
from sugar_utils.device import DeviceChoice, upload
from sugar_utils.files import read_json
from tests.support.extractions import brief_extraction
from tests.support.mesh_scenes import cameras_around, icosahedron, sphere_cloud, write_mesh_scene
from tests.support.pretend_device import (
    FACTORIES,
    GPU,
    HOST,
    ROOT,
    WrongSide,
    pretend_gpu,
    side_of,
)
from tests.support.refined_models import refined_state, save_model
from tests.support.repository import all_files
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    assert_same_bits,
    disturbed_cloud,
    make_tiny_checkpoint,
    make_tiny_scene,
    run_cli,
    tiny_cloud,
)
from tests.support.training import everywhere, learn

EXTENT, ITERATION = 3.0, 9_100

pytestmark = pytest.mark.usefixtures("small_pictures")


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return make_tiny_scene(tmp_path_factory.mktemp("neutral") / "scene")


def cloud_on_gpu() -> GaussianCloud:
    return disturbed_cloud(tiny_cloud()).to(GPU)


def on_host(values):
    """Save and load a checkpoint."""
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, values)


def stages(tmp_path, scene, images):
    """One stage of each kind, at an iteration where all its terms act."""
    short = CoarseSchedule(entropy_stop=9_500)
    for mode in ("density", "sdf", "dn_consistency"):
        for full in (True, False):
            config = CoarseConfig(mode, short, sdf_samples=500, full_res_normals=full)
            yield CoarseStage(cloud_on_gpu(), config, everywhere(EXTENT), print), ITERATION
    split = CoarseConfig("sdf", short, sdf_samples=500, sample_chunk=200, split=ImageSplit(2))
    yield CoarseStage(cloud_on_gpu(), split, everywhere(EXTENT), print), ITERATION
    config = VanillaConfig(random_background=True)
    yield VanillaStage(cloud_on_gpu(), config, everywhere(EXTENT), tmp_path), 600
    mesh = icosahedron()
    bound = bind_to_mesh(
        torch.tensor(mesh.vertices, dtype=torch.float32, device=GPU),
        torch.tensor(mesh.faces, device=GPU),
        torch.tensor(mesh.colors, device=GPU).float() / 255,
        3,
        EXTENT,
    )
    yield RefineStage(bound, RefineConfig(), EXTENT), 1
    far = NeighborRule(max_angle=90.0, max_baseline=5.0)
    neighbors = NeighborViews(scene.cameras, EXTENT, far)
    comparing = MultiviewConfig(multiview_pixels=500)
    cameras = scene.cameras
    comparer = ViewComparer(
        neighbors, images, EXTENT, ComparisonRule(500, 0), device=cloud_on_gpu().means.device
    )
    multiview = MultiviewStage(
        cloud_on_gpu(), comparing, everywhere(EXTENT), cameras, comparer, lambda line: None
    )
    yield multiview, 8_000
    surface = RefineConfig(refine_surface_terms=True)
    yield RefineStage(bound, surface, EXTENT, comparer=comparer), 1


def test_steps_of_all_stages_stay_on_the_device(scene, tmp_path):
    camera = scene.cameras[2]
    with pretend_gpu() as sides, ImageStore() as images:
        for stage, iteration in stages(tmp_path, scene, images):
            stage.begin(iteration)
            target = upload(images.get(camera), GPU)
            result = learn(stage, iteration, camera, target)
            stage.apply(iteration)
            assert side_of(images.get(camera)) is HOST
            for name, parameter in stage.model.optimizer.parameters.items():
                assert side_of(parameter) is GPU, f"{stage.name}: {name}"
            assert result.radii.device == GPU
            assert all(side_of(term) is not HOST for term in result.terms.values())
            stage.view_metrics(camera, stage.render(camera, geometry=True))
            saved, extra = on_host((stage.model.state(), stage.extra_state()))
            stage.model.restore(saved)
            stage.restore_extra(extra)
            stage.begin(iteration + 1)
            learn(stage, iteration + 1, camera, target)
    assert sides.made[GPU] > 50


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dn_consistency", "sdf"])
def test_the_pipeline_runs_on_the_device_and_goes_on_on_the_host(
    mode, scene, tmp_path, monkeypatch, capsys
):
    start = tmp_path / "start.ply"
    write_gaussian_ply(start, scene.cloud)
    words = ["-s", scene.root, *SHORT_PIPELINE, "-r", mode, "--init_ply", start, "--output_dir"]
    if mode == "sdf":
        words = ["--mesh_extractor", "tsdf", "--texture_source", "photos", *words]
    assert run_cli(train_full_pipeline.main, *words, tmp_path / "host", "--device", "cpu") == 0
    chosen = DeviceChoice(GPU, "computing on the pretended device")
    with monkeypatch.context() as patch:
        patch.setattr(compute, "choose_device", lambda *_: chosen)
        with pretend_gpu() as sides:
            assert run_cli(train_full_pipeline.main, *words, tmp_path / "gpu") == 0
    assert sides.made[GPU] > 200
    assert "computing on the pretended device" in capsys.readouterr().out
    # The kernels are the same, so the bits must be, and a device must be no part of a file.
    results = sorted(p.relative_to(tmp_path / "host") for p in (tmp_path / "host").rglob("*.pt"))
    assert len(results) >= 3
    for path in results:
        assert_same_bits(tmp_path / "host" / path, tmp_path / "gpu" / path)
    # What one device made, the other takes for finished.
    assert run_cli(train_full_pipeline.main, *words, tmp_path / "gpu", "--device", "cpu") == 0
    assert "exists already" in capsys.readouterr().out


# The pretended device itself


def test_mistakes_are_seen():
    with pretend_gpu():
        here, there = torch.ones(2, device="cpu"), torch.ones(2, device=GPU)
        assert (here.device, there.device, (2 * there).device) == (HOST, GPU, GPU)
        assert there.cpu().device == HOST
        assert there.device == GPU
        for wrong in (
            lambda: here + there,
            lambda: torch.cat([here, there]),
            lambda: there.numpy(),
            lambda: np.asarray(there),
        ):
            with pytest.raises(WrongSide):
                wrong()


# The source


def calls_without_device(path: Path) -> list[int]:
    """Lines that call a factory of torch without ``device``, conversions of tensors aside."""
    names = {function.__name__ for function in FACTORIES}
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in names:
            given = {keyword.arg for keyword in node.keywords}
            if "device" not in given and node.func.attr != "as_tensor":
                lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_every_new_tensor_says_where_it_is():
    missing = {}
    for folder in sorted(p for p in ROOT.iterdir() if (p / "__init__.py").is_file()):
        if folder.name == "tests":
            continue
        for path in folder.rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            lines = calls_without_device(path)
            if lines:
                missing[name] = lines
    assert not missing


def test_no_default_device_is_set():
    for path in all_files():
        if "tests" not in path.relative_to(ROOT).parts:
            text = path.read_text(encoding="utf-8")
            for name in ("set_default_device", "set_default_tensor_type"):
                assert name not in text, path
            # The one place that says to which GPU pinned memory and libraries belong.
            assert path.name == "device.py" or "cuda.set_device" not in text, path


# Other ways to a mesh and a texture, and the measuring of finished models


@pytest.fixture(scope="module")
def mesh_scene(tmp_path_factory):
    return write_mesh_scene(
        tmp_path_factory.mktemp("neutral_mesh"), sphere_cloud(), cameras_around()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"mesh_extractor": "poisson", "surface_points": 20_000},
        {"mesh_extractor": "tsdf", "tsdf": TsdfConfig(tsdf_voxel_size=0.08)},
        {"mesh_extractor": "tetrahedra", "tsdf": TsdfConfig(tsdf_voxel_size=0.08)},
    ],
    ids=["level set", "blended", "tetrahedra"],
)
def test_meshes_are_extracted_on_the_device(extra, mesh_scene, tmp_path):
    meshes = []
    for device in (HOST, GPU):
        options = brief_extraction(
            mesh_scene,
            tmp_path / str(device.index),
            decimation_targets=(500,),
            poisson=PoissonConfig(poisson_depth=5),
            background_mesh=False,
            compute=Compute(device),
            **extra,
        )
        with pretend_gpu():
            meshes.append(read_mesh_ply(extract_coarse_mesh(options)[0]))
    np.testing.assert_array_equal(meshes[0].vertices, meshes[1].vertices)
    assert meshes[0].n_faces > 100


@pytest.mark.slow
@pytest.mark.parametrize("uv_texture", [True, False], ids=["textured", "Gaussians"])
def test_textures_and_measuring_work_on_the_device(uv_texture, scene, tmp_path):
    root = tmp_path / "output"
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    options = MetricsOptions(
        scene_config=json.dumps({str(scene.root): str(checkpoint)}),
        regularization_type="dn_consistency",
        n_vertices_in_mesh=300,
        gaussians_per_triangle=3,
        evaluate_vanilla=True,
        use_uv_texture=uv_texture,
        output_dir=root,
        compute=Compute(GPU),
    )
    model = save_model(root / "refined" / "scene", refined_state(), options.refined_name)
    with pretend_gpu():
        if uv_texture:
            extract_textured_mesh(
                TextureOptions(
                    scene_path=scene.root,
                    checkpoint_path=checkpoint,
                    refined_model_path=model,
                    mesh_output_dir=root / "refined_mesh" / "scene",
                    postprocess_mesh=False,
                    compute=Compute(GPU),
                )
            )
            # Peeling asks the density of border triangles.
            extract_textured_mesh(
                TextureOptions(
                    scene_path=scene.root,
                    checkpoint_path=checkpoint,
                    refined_model_path=model,
                    mesh_output_dir=tmp_path / "peeled",
                    postprocess_mesh=True,
                    compute=Compute(GPU),
                )
            )
        written = measure(options)
    figures = read_json(written)["scene"]
    assert set(figures) == {"3dgs_7k", options.key}
    assert all(0 < found["psnr"] < 60 for found in figures.values())
