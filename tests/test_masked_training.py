# SPDX-License-Identifier: Apache-2.0
"""Masks in training: outside of an object nothing stays, and what is ignored says nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train
import train_refined
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.components.densification import Region
from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.masks import VisualHull, distance_outside
from gaussian_splatting.engine.reporting.evaluation import MAX_PSNR, score_views
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.engine.training_views import (
    ColorLoss,
    ImageStrip,
    TrainingView,
    color_loss,
    composited_view,
    halved_mask,
)
from gaussian_splatting.rasterization import Rows, rasterize
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, CoarseSchedule, RefineConfig
from tests.support.brief_runs import vanilla_flags
from tests.support.color_losses import l1_and_ssim
from tests.support.mesh_scenes import icosahedron
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    TinyScene,
    assert_same_bits,
    disturbed_cloud,
    load_pt,
    make_tiny_scene,
    run_cli,
    tiny_cloud,
)
from tests.support.training import accumulate, everywhere, learn

EXTENT, ITERATION = 3.0, 9_100
STAGES = ("vanilla", "coarse", "half size", "sdf", "refine")


def masked_view(mode):
    """A view of the tiny scene's sphere, and its photograph with a mask of the left half."""
    camera = look_at((2.6, 1.2, 0.7), width=51, height=37, focal=45.0, principal=(2.3, -1.7))
    camera = replace(camera, mask=ViewMask(Path("mask.png"), mode))
    with torch.no_grad():
        image = rasterize(tiny_cloud().activate(), camera).image.clamp(0, 1)
    photograph = torch.cat([image * 255, torch.zeros(37, 51, 1)], dim=2).to(torch.uint8)
    photograph[:, :25, 3] = 255
    return camera, photograph


def make_stage(kind, split=WHOLE_IMAGE):
    if kind == "vanilla":
        return VanillaStage(
            disturbed_cloud(tiny_cloud()), VanillaConfig(split=split), everywhere(EXTENT), None
        )
    if kind == "refine":
        mesh = icosahedron()
        vertices = torch.tensor(mesh.vertices, dtype=torch.float32)
        colors = torch.tensor(mesh.colors).float() / 255
        cloud = bind_to_mesh(vertices, torch.tensor(mesh.faces), colors, 6, EXTENT)
        return RefineStage(cloud, RefineConfig(split=split), EXTENT)
    config = CoarseConfig(
        "sdf" if kind == "sdf" else "dn_consistency",
        CoarseSchedule(entropy_stop=9_500),
        sdf_samples=3_000,
        full_res_normals=kind != "half size",
        split=split,
    )
    return CoarseStage(disturbed_cloud(tiny_cloud()), config, everywhere(EXTENT), print)


def gradients(kind, camera, photograph, split=WHOLE_IMAGE, view_index=0):
    stage, iteration = make_stage(kind, split), 1 if kind in ("vanilla", "refine") else ITERATION
    stage.begin(iteration)
    result = accumulate(stage, iteration, camera, photograph, view_index)
    extra = dict(enumerate(stage.step_statistics()))
    return {**stage.model.optimizer.gradients(), **extra, **result.terms}


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("mode", ["object", "ignore"])
def test_strips_add_up_to_the_masked_image(kind, mode):
    camera, photograph = masked_view(mode)
    whole = gradients(kind, camera, photograph)
    parts = gradients(kind, camera, photograph, ImageSplit(5))
    for name, value in whole.items():
        scale = float(value.double().norm())
        # Round Gaussians at the start of a refinement have turns of no gradient but rounding.
        assert float((parts[name] - value).double().norm()) <= 2e-5 * scale + 1e-8, name


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("mode", ["object", "ignore"])
def test_masked_pixels_change_no_bit(kind, mode):
    camera, photograph = masked_view(mode)
    other = photograph.clone()
    other[:, 25:, :3] = torch.randint(0, 256, (37, 26, 3), dtype=torch.uint8)
    first, second = (gradients(kind, camera, image) for image in (photograph, other))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other[:, :25, :3] = 0
    third = gradients(kind, camera, other)
    assert not torch.equal(first["loss"], third["loss"])


def test_the_background_follows_from_seed_iteration_and_view():
    camera, photograph = masked_view("object")

    def color(seed, iteration, view_index):
        black = torch.zeros(3)
        view = TrainingView(camera, photograph, iteration, view_index)
        return composited_view(view, black, seed).background.tolist()

    labels = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]
    colors = [color(*one) for one in labels]
    assert colors == [color(*one) for one in labels]
    assert len({tuple(one) for one in colors}) == 4


def test_a_gaussian_in_the_background_becomes_transparent():
    camera, _ = masked_view("object")
    black = torch.zeros(camera.height, camera.width, 4, dtype=torch.uint8)
    cloud = tiny_cloud()
    stage = VanillaStage(cloud, VanillaConfig(), everywhere(EXTENT), None)
    seen = rasterize(cloud.activate(), camera).visible
    before = stage.model.cloud.opacity_logits.detach().clone()
    for iteration in range(1, 121):
        stage.begin(iteration)
        result = accumulate(stage, iteration, camera, black)
        stage.apply(iteration)
    lowered = (stage.model.cloud.opacity_logits.detach() < before - 0.5).squeeze(-1)
    with torch.no_grad():
        alpha = stage.render(camera, geometry=False).alpha
    start = rasterize(cloud.activate(), camera).alpha
    assert float(alpha.mean()) < 0.25 * float(start.mean())
    assert int(lowered.sum()) > 20
    assert bool(seen[lowered].all())
    assert result.radii.shape == seen.shape


def test_what_is_ignored_is_left_out_of_the_mean():
    generator = torch.Generator().manual_seed(0)
    image, target = (torch.rand(40, 30, 3, generator=generator) for _ in range(2))
    photograph = torch.cat([target * 255, torch.full((40, 30, 1), 255.0)], dim=2).to(torch.uint8)
    image.requires_grad_()

    def compared() -> ColorLoss:
        view = TrainingView(look_at((1.0, 1.0, 1.0), width=30, height=40), photograph)
        return color_loss(ImageStrip(view, Rows(0, 40), slice(0, 40), {"color": image}), 0.2)

    plain = l1_and_ssim(image, photograph[..., :3].float() / 255)
    found = compared()[1:]
    for masked, reference in zip(found, plain, strict=True):
        assert float(masked.detach()) == pytest.approx(float(reference.detach()), rel=1e-6)
    photograph[20:, :, 3] = 0
    loss, l1, ssim = compared()
    mixed = 0.8 * l1 + 0.2 * (1 - ssim)
    assert float(loss.detach()) == pytest.approx(float(mixed.detach()), rel=1e-6)
    expected = (image - photograph[..., :3].float() / 255)[:20].abs().mean()
    assert float(l1.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (l1 - ssim).backward()
    assert not image.grad[20:].any()
    assert image.grad[:20].all(dim=2).any()
    # Half of the image is known, and all of it different: so is the share of SSIM that is lost.
    assert 0 < 1 - float(ssim.detach()) < 1.5


def test_a_pixel_of_half_the_size_counts_where_all_it_covers_do():
    camera, photograph = masked_view("ignore")
    half = camera.resized(25, 18)
    mask = halved_mask(photograph, half)[..., 3]
    assert mask.shape == (18, 25)
    assert (mask[0] > 0).tolist() == [x < 12 for x in range(25)]
    assert halved_mask(photograph[..., :3], half) is None


def test_gaussians_outside_of_the_hull_go_with_a_densification():
    camera, photograph = masked_view("object")
    rules = replace(VanillaConfig().densification, densify_from_iter=1, densification_interval=2)
    hull = VisualHull((camera,), (distance_outside(photograph[..., 3] > 0),))
    config = VanillaConfig(densification=rules)
    stage = VanillaStage(tiny_cloud(), config, Region(EXTENT, hull=hull), None)
    for iteration in (1, 2):
        stage.begin(iteration)
        learn(stage, iteration, camera, photograph)
        stage.apply(iteration)
    assert len(stage.model) == len(tiny_cloud())
    stage.begin(3)
    assert 0 < len(stage.model) < len(tiny_cloud())
    assert hull.contains(stage.model.cloud.means).all()
    assert stage.extra_state()["views"].shape == (len(stage.model),)


def test_the_coarse_prune_keeps_the_hull():
    camera, photograph = masked_view("object")
    hull = VisualHull((camera,), (distance_outside(photograph[..., 3] > 0),))
    said = []
    stage = CoarseStage(tiny_cloud(), CoarseConfig(), Region(EXTENT, hull=hull), said.append)
    stage.begin(9_001)
    assert 0 < len(stage.model) < len(tiny_cloud())
    assert hull.contains(stage.model.cloud.means).all()
    assert "inside of the masks' hull" in said[0]


def test_figures_are_of_the_whole_and_of_what_counts():
    camera, photograph = masked_view("ignore")
    right = photograph[..., :3].float() / 255
    wrong = right.clone()
    wrong[:, 25:] = 1 - wrong[:, 25:]
    result = score_views(lambda _: wrong, [camera], lambda _: photograph)
    assert result.psnr < 20
    assert result.counted["psnr"] == MAX_PSNR
    assert result.counted["ssim"] == pytest.approx(1.0)
    assert score_views(lambda _: right, [camera], lambda _: photograph[..., :3]).counted == {}


# Whole runs


@pytest.fixture(scope="module")
def masked_scene(tmp_path_factory) -> TinyScene:
    """The tiny scene before a wall of noise, with masks of its sphere."""
    scene = make_tiny_scene(tmp_path_factory.mktemp("masked") / "scene")
    rng = np.random.default_rng(0)
    for camera in scene.cameras:
        with torch.no_grad():
            alpha = rasterize(scene.cloud.activate(), camera).alpha.numpy()
        path = scene.root / "masks" / f"{camera.name}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((alpha * 255).round().astype(np.uint8)).save(path)
        noise = rng.integers(0, 256, (camera.height, camera.width, 3))
        image = np.asarray(Image.open(camera.image_path)) + (1 - alpha[..., None]) * noise
        Image.fromarray(image.astype(np.uint8)).save(camera.image_path)
    return scene


def vanilla_run(scene: Path, output: Path, *more: object) -> int:
    settings = {
        "densify_until_iter": None,
        "opacity_reset_interval": None,
        "checkpoint_interval": 10,
        "test_iterations": 24,
        "keep_checkpoints": 9,
    }
    return run_cli(vanilla_train.main, *vanilla_flags(scene, m=output, **settings), *more)


def copy_with_other_background(scene: TinyScene, root: Path) -> Path:
    """The scene with other noise where the masks are black."""
    shutil.copytree(scene.root, root)
    rng = np.random.default_rng(1)
    for camera in scene.cameras:
        hidden = np.asarray(Image.open(root / "masks" / f"{camera.name}.png")) < 128
        image = np.asarray(Image.open(root / "images" / camera.name)).copy()
        image[hidden] = rng.integers(0, 256, (int(hidden.sum()), 3))
        Image.fromarray(image).save(root / "images" / camera.name)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["object", "ignore"])
def test_resume_equals_uninterrupted_with_masks(masked_scene, tmp_path, mode, capsys):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    flags = ("--mask_mode", mode, "--views_per_step", 2)
    assert vanilla_run(masked_scene.root, straight, *flags, "--verbose") == 0
    out = capsys.readouterr().out
    assert "masks of 10 of 10 photographs" in out
    assert "of these only what the masks count, PSNR" in out
    (resumed / "checkpoints").mkdir(parents=True)
    for name in ("10.pt", "run.json"):
        shutil.copy(straight / "checkpoints" / name, resumed / "checkpoints" / name)
    assert vanilla_run(masked_scene.root, resumed, *flags) == 0
    assert_same_bits(straight / "checkpoints" / "24.pt", resumed / "checkpoints" / "24.pt")


@pytest.mark.slow
def test_an_ignored_background_changes_no_bit_of_a_run(masked_scene, tmp_path):
    other = copy_with_other_background(masked_scene, tmp_path / "other")
    for name, root in (("a", masked_scene.root), ("b", other)):
        assert vanilla_run(root, tmp_path / name, "--mask_mode", "ignore") == 0
    files = [tmp_path / name / "checkpoints" / "24.pt" for name in ("a", "b")]
    assert_same_bits(*files)


def test_another_mask_mode_is_another_run(masked_scene, tmp_path, capsys):
    assert vanilla_run(masked_scene.root, tmp_path) == 0
    assert vanilla_run(masked_scene.root, tmp_path, "--mask_mode", "ignore") == 2
    assert "masks: view_01.png" in capsys.readouterr().err
    assert vanilla_run(masked_scene.root, tmp_path, "--masks", "none") == 2


def test_masks_that_exclude_every_point_are_an_error(masked_scene, tmp_path, capsys):
    root = tmp_path / "scene"
    shutil.copytree(masked_scene.root, root)
    for path in (root / "masks").iterdir():
        corner = np.zeros((48, 64), np.uint8)
        corner[:2, :2] = 255
        Image.fromarray(corner).save(path)
    assert vanilla_run(root, tmp_path / "model") == 2
    assert "lies inside of the masks" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_refinement_takes_masks(masked_scene, checkpoint, tmp_path):
    mesh = tmp_path / "sugarmesh_ball.ply"
    write_mesh_ply(mesh, icosahedron())
    finals = []
    for masks in ("masks", "none"):
        flags = ("-s", masked_scene.root, "-c", checkpoint, "-m", mesh, "-f", 3, "-g", 1)
        assert run_cli(train_refined.main, *flags, "-o", tmp_path / masks, "--masks", masks) == 0
        (path,) = (tmp_path / masks).rglob("3.pt")
        finals.append(load_pt(path)["state_dict"])
    assert any(not torch.equal(value, finals[1][name]) for name, value in finals[0].items())


@pytest.mark.slow
@pytest.mark.usefixtures("small_pictures")
def test_a_pipeline_with_masks_makes_a_mesh_of_the_object(
    masked_scene, checkpoint, tmp_path, capsys
):
    code = run_cli(
        train.main,
        "-s",
        masked_scene.root,
        "-c",
        checkpoint,
        *SHORT_PIPELINE,
        "--texture_source",
        "photos",
        "--output_dir",
        tmp_path,
        "--verbose",
    )
    assert code == 0, capsys.readouterr().err
    assert "outside of the masks cut off" in capsys.readouterr().out
    assert list(tmp_path.rglob("*.obj"))
    (note,) = (tmp_path / "coarse_mesh").rglob("*.json")
    # Nothing of an object is cut away for being badly supported.
    assert json.loads(note.read_text())["settings"]["poisson"]["vertices_density_quantile"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "grows"),
    [
        (("--preset", "fast"), False),
        (("--preset", "fast", "--growing_resolution", "True"), True),
        (("--preset", "fast", "--mask_mode", "ignore"), True),
    ],
)
def test_images_of_an_object_do_not_grow_unless_they_are_asked_to(
    masked_scene, tmp_path, monkeypatch, flags, grows
):
    widths, accumulate = [], VanillaStage.accumulate

    def watched(self, view, resources):
        widths.append(view.camera.width)
        return accumulate(self, view, resources)

    monkeypatch.setattr(VanillaStage, "accumulate", watched)
    assert vanilla_run(masked_scene.root, tmp_path / "out", *flags) == 0
    assert (min(widths) < max(widths)) == grows
