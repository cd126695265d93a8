# SPDX-License-Identifier: Apache-2.0
"""One image in several strips: the gradient of the whole, with the memory of a strip."""

import weakref
from dataclasses import replace

import pytest
import torch

import train_refined
from gaussian_splatting.core.cloud import NO_CUTOFF
from gaussian_splatting.engine.gradients import backpropagate_weighted
from gaussian_splatting.engine.loss_terms import COLOR, LossTerm
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit, ViewPass
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.losses.photometric import SSIM_HALO
from gaussian_splatting.rasterization import (
    Rows,
    blend_rows,
    build_tile_lists,
    channel_background,
    project,
    rasterize,
)
from gaussian_splatting.rasterization.rasterizers import WarpRasterizer
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.coarse_run import CoarseOptions
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_run import RefineOptions
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, CoarseSchedule, RefineConfig
from sugar_trainers.terms import coarse_terms
from sugar_utils.device import constants
from tests.support.brief_runs import brief_coarse
from tests.support.color_losses import color_loss, l1_and_ssim
from tests.support.command_words import parse
from tests.support.depth_normals import depth_normal_consistency
from tests.support.mesh_scenes import icosahedron
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.tiny_scene import disturbed_cloud, run_cli, tiny_cloud
from tests.support.training import accumulate, everywhere, learn

WIDTH, HEIGHT = 51, 37
EXTENT = 3.0
ITERATION = 9_100
DEPTH_NORMALS = next(term for term in coarse_terms(CoarseConfig()) if term.name == "dn")


def view(width=WIDTH, height=HEIGHT):
    """The tiny scene's sphere at an odd size, with the principal point off the middle."""
    return look_at((2.6, 1.2, 0.7), width=width, height=height, focal=45.0, principal=(2.3, -1.7))


def photograph(camera):
    with torch.no_grad():
        return rasterize(tiny_cloud().activate(), camera).image.clamp(0, 1)


def coarse_gradients(mode, split, *, camera=None, full=True):
    camera = camera or view()
    # Both the entropy and the geometric terms, in one iteration.
    schedule = CoarseSchedule(entropy_stop=9_500)
    config = CoarseConfig(mode, schedule, sdf_samples=3_000, full_res_normals=full, split=split)
    stage = CoarseStage(disturbed_cloud(tiny_cloud()), config, everywhere(EXTENT), print)
    stage.begin(ITERATION)
    result = accumulate(stage, ITERATION, camera, photograph(camera))
    return stage.model.optimizer.gradients(), result


def vanilla_gradients(split, tmp_path):
    camera = view()
    stage = VanillaStage(
        disturbed_cloud(tiny_cloud()), VanillaConfig(split=split), everywhere(EXTENT), tmp_path
    )
    stage.begin(1)
    result = learn(stage, 1, camera, photograph(camera))
    (statistics,) = stage.step_statistics()
    return {**stage.model.optimizer.gradients(), "statistics": statistics[:, 0]}, result


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        a, b = found[name].double().flatten(), value.double().flatten()
        norm = float(b.norm())
        assert norm > 0, name
        assert float((a - b).norm()) <= 1e-5 * norm, name
        assert float(a @ b) / (float(a.norm()) * norm) >= 0.999999, name


def assert_same_results(found, expected):
    assert torch.equal(found.radii, expected.radii)
    assert found.terms.keys() == expected.terms.keys()
    for name, value in expected.terms.items():
        assert float(found.terms[name]) == pytest.approx(float(value), rel=1e-5), name


# Blending


@pytest.mark.parametrize("cutoff", [NO_CUTOFF, 2.5])
@pytest.mark.parametrize("rows", [(0, 90), (0, 1), (89, 90), (3, 40), (16, 32), (31, 33)])
def test_a_pixel_has_the_same_bits_whatever_rows_are_blended(rows, cutoff):
    camera = look_at((2.5, 1.2, 0.8), width=121, height=90, focal=90.0, principal=(5, 3))
    gaussians = random_gaussians(2_000, 3, torch.float32)
    gaussians = replace(gaussians, cutoff_deviations=cutoff)
    projection = project(gaussians, camera, depth=True, normal=True)
    tiles = build_tile_lists(projection)
    background = channel_background(projection, torch.tensor([0.2, 0.5, 0.9]))
    whole = blend_rows(projection.splats, tiles, background, Rows(0, camera.height))
    part = blend_rows(projection.splats, tiles, background, Rows(*rows))
    assert part.pixels.shape == (rows[1] - rows[0], camera.width, 6)
    for name in ("pixels", "transmittance", "last"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[rows[0] : rows[1]]), name


@pytest.mark.parametrize(("height", "strips"), [(37, 1), (37, 4), (37, 36), (37, 37), (5, 100)])
def test_strips_cover_every_row_once(height, strips):
    rows = ImageSplit(strips).rows(height)
    assert len(rows) == min(strips, height)
    assert [y for strip in rows for y in range(strip.start, strip.stop)] == list(range(height))
    sizes = [strip.stop - strip.start for strip in rows]
    assert max(sizes) - min(sizes) <= 1


def test_a_halo_ends_at_the_border():
    assert Rows(3, 20).widened(5, 22) == Rows(0, 22)
    assert Rows(8, 9).widened(5, 22) == Rows(3, 14)


# Losses


@pytest.mark.parametrize("strips", [2, 3, 40])
def test_colour_losses_of_strips_add_up_to_that_of_the_image(strips):
    rng = torch.Generator().manual_seed(0)
    target = torch.rand(40, 29, 3, generator=rng)
    image = (target + 0.2 * torch.randn(40, 29, 3, generator=rng)).requires_grad_(True)
    color_loss(image, target).backward()
    expected, image.grad = image.grad, None
    whole = torch.stack(l1_and_ssim(image.detach(), target))
    sums = torch.zeros(2)
    for rows in ImageSplit(strips).rows(40):
        shown = rows.widened(SSIM_HALO, 40)
        part, photo = image[shown.start : shown.stop], target[shown.start : shown.stop]
        counted = slice(rows.start - shown.start, rows.stop - shown.start)
        sums += torch.stack(l1_and_ssim(part.detach(), photo, rows=counted, total_rows=40))
        color_loss(part, photo, rows=counted, total_rows=40).backward()
    torch.testing.assert_close(sums, whole, rtol=1e-6, atol=0)
    assert float((image.grad - expected).norm()) <= 1e-6 * float(expected.norm())


def test_the_torch_twin_counts_the_same_rows():
    rng = torch.Generator().manual_seed(1)
    image, target = (torch.rand(19, 13, 3, generator=rng) for _ in range(2))
    fused = l1_and_ssim(image, target, rows=slice(5, 9), total_rows=31)
    twin = l1_and_ssim(image.double(), target.double(), rows=slice(5, 9), total_rows=31)
    for a, b in zip(fused, twin, strict=True):
        assert float(a) == pytest.approx(float(b), abs=1e-5)


# Stages


@pytest.mark.slow
@pytest.mark.parametrize("strips", [2, 5, HEIGHT, 1_000])
@pytest.mark.parametrize(
    ("mode", "full"),
    [("density", True), ("sdf", True), ("dn_consistency", True), ("dn_consistency", False)],
)
def test_coarse_gradients_are_those_of_the_whole_image(mode, full, strips):
    expected, whole = coarse_gradients(mode, WHOLE_IMAGE, full=full)
    found, result = coarse_gradients(mode, ImageSplit(strips), full=full)
    field_term = "sdf" if mode == "sdf" else "density"
    dn = {"dn"} if mode == "dn_consistency" else set()
    assert whole.terms.keys() == {"loss", "color", "entropy", field_term, "normal"} | dn
    assert_same_gradients(found, expected)
    assert_same_results(result, whole)


@pytest.mark.parametrize(("width", "height"), [(33, 16), (17, 3), (40, 2), (9, 65)])
def test_small_and_odd_images_can_be_split(width, height):
    camera = view(width, height)
    expected, whole = coarse_gradients("dn_consistency", WHOLE_IMAGE, camera=camera)
    found, result = coarse_gradients("dn_consistency", ImageSplit(3), camera=camera)
    assert_same_gradients(found, expected)
    assert_same_results(result, whole)


@pytest.mark.parametrize("strips", [3, HEIGHT])
def test_vanilla_gradients_and_densification_statistics_are_those_of_the_whole(strips, tmp_path):
    expected, whole = vanilla_gradients(WHOLE_IMAGE, tmp_path)
    # At degree 0 the higher bands have no gradient.
    assert "sh_rest" not in expected
    found, result = vanilla_gradients(ImageSplit(strips), tmp_path)
    assert_same_gradients(found, expected)
    assert_same_results(result, whole)


def test_refinement_gradients_are_those_of_the_whole_image():
    camera = view()
    gradients, results = [], []
    for split in (WHOLE_IMAGE, ImageSplit(4)):
        stage = RefineStage(bound_ball(), RefineConfig(split=split, sh_interval=1), EXTENT)
        stage.begin(4)
        results.append(accumulate(stage, 4, camera, photograph(camera)))
        gradients.append(stage.model.optimizer.gradients())
    assert_same_gradients(gradients[1], gradients[0])
    assert_same_results(results[1], results[0])


def bound_ball():
    mesh = icosahedron()
    vertices, faces = torch.tensor(mesh.vertices), torch.tensor(mesh.faces)
    cloud = bind_to_mesh(vertices, faces, torch.tensor(mesh.colors / 255), 3, EXTENT)
    # Round discs have no gradient of their rotation.
    return replace(cloud, log_scales=cloud.log_scales + torch.tensor([0.5, -0.5]))


def test_bits_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single, _ = coarse_gradients("dn_consistency", ImageSplit(3))
        torch.set_num_threads(3)
        several, _ = coarse_gradients("dn_consistency", ImageSplit(3))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(single[name], several[name]) for name in single)


def test_depth_in_strips_has_the_bits_of_the_depth_of_the_whole():
    gaussians, camera = random_gaussians(500, 4, torch.float32), view()
    maps = [
        ViewPass(
            project(gaussians, camera, depth=True),
            TrainingView(camera, None),
            ImageSplit(strips),
            farthest_depth_behind=True,
        ).depth()
        for strips in (1, 4)
    ]
    assert torch.equal(*maps)
    expected = rasterize(gaussians, camera, depth=True, farthest_depth_behind=True).depth
    assert torch.equal(maps[0], expected)


@pytest.mark.parametrize("strips", [1, 3])
def test_a_photograph_of_bytes_gives_the_bits_of_one_of_floats(strips):
    camera = view()
    photo = (photograph(camera) * 255).round().to(torch.uint8)
    gradients = []
    for target in (photo, photo.to(torch.float32) / 255.0):
        leaves = disturbed_cloud(tiny_cloud()).activate().as_leaves()
        view_pass = ViewPass(
            project(leaves, camera), TrainingView(camera, target), ImageSplit(strips)
        )
        terms, _ = view_pass.backpropagate([COLOR])
        gradients.append([terms["color"], leaves.means.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Memory


def test_a_strip_is_as_large_as_its_rows_and_freed_before_the_next():
    camera, seen = view(height=64), []
    leaves = random_gaussians(300, 5, torch.float32).as_leaves()

    def value(strip):
        assert all(earlier() is None for earlier, _ in seen)
        seen.append((weakref.ref(strip.color), strip.color.shape[0]))
        return COLOR.value(strip)

    target = TrainingView(camera, photograph(camera))
    view_pass = ViewPass(project(leaves, camera), target, ImageSplit(4))
    view_pass.backpropagate([LossTerm("color", 1.0, "image", value, halo=COLOR.halo)])
    assert [rows for _, rows in seen] == [21, 26, 26, 21]


def test_gaussians_are_sorted_once(monkeypatch):
    sorted_views, picture = [], photograph(view())
    original = WarpRasterizer.build_tile_lists

    def watched(self, projection):
        sorted_views.append(projection)
        return original(self, projection)

    monkeypatch.setattr(WarpRasterizer, "build_tile_lists", watched)
    leaves, camera = random_gaussians(50, 5, torch.float32).as_leaves(), view()

    target = TrainingView(camera, picture)
    ViewPass(project(leaves, camera), target, ImageSplit(6)).backpropagate([COLOR])
    assert len(sorted_views) == 1


# Terms by themselves, and nothing to see


def test_a_view_of_nothing_can_be_split():
    leaves, camera = random_gaussians(0, 0, torch.float32).as_leaves(), view()
    target = TrainingView(camera, torch.zeros(HEIGHT, WIDTH, 3))
    projection = project(leaves, camera, depth=True, normal=True)
    view_pass = ViewPass(projection, target, ImageSplit(3))
    terms, d_means2d = view_pass.backpropagate([COLOR, DEPTH_NORMALS])
    assert d_means2d.shape == (0, 2)
    assert float(terms["color"]) == pytest.approx(0.0, abs=1e-6)
    assert float(terms["dn"]) == pytest.approx(1.0)


def test_the_depth_normal_term_of_strips_is_that_of_the_whole_map():
    leaves, camera = disturbed_cloud(tiny_cloud()).activate().as_leaves(), view()
    projection = project(leaves, camera, rgb=False, depth=True, normal=True)
    view_pass = ViewPass(projection, TrainingView(camera, None), ImageSplit(7))
    terms, _ = view_pass.backpropagate([DEPTH_NORMALS])
    maps = rasterize(leaves, camera, rgb=False, depth=True, normal=True)
    intrinsics = camera.fx, camera.fy, camera.cx, camera.cy
    expected = depth_normal_consistency(maps.depth, maps.normal, *intrinsics)
    assert float(terms["dn"]) == pytest.approx(float(expected.detach()), rel=1e-5)


# Flags


def coarse_memory_of(*flags):
    words = ["-s", "scene", "-c", "checkpoint", *flags]
    options = parse(CoarseOptions, words, regularization_type="density")
    return options.memory, options.messages


def test_flags_choose_the_strips():
    assert coarse_memory_of()[0].split == WHOLE_IMAGE
    assert coarse_memory_of("--gradient_accumulation", "True")[0].split == ImageSplit(4)
    memory, messages = coarse_memory_of("--gradient_accumulation", "--accumulation_steps", "7")
    assert memory.split == ImageSplit(7)
    assert messages == ()
    memory, messages = coarse_memory_of("--accumulation_steps", "7")
    assert memory.split == WHOLE_IMAGE
    assert "--accumulation_steps has no effect" in messages[0]
    memory, messages = coarse_memory_of("--use_gradient_checkpointing", "True")
    assert memory.split == WHOLE_IMAGE
    assert "--use_gradient_checkpointing has no effect" in messages[0]


def test_flags_act_in_every_trainer():
    flags = ["--gradient_accumulation", "True", "--accumulation_steps", "5"]
    vanilla = parse(VanillaOptions, ["-s", "scene", "-m", "model", *flags])
    assert vanilla.memory.split == ImageSplit(5)
    refine = parse(RefineOptions, ["-s", "a", "-c", "b", "-m", "mesh.ply", *flags])
    assert refine.memory.split == ImageSplit(5)


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        coarse_memory_of("--gradient_accumulation", "True", "--accumulation_steps", "0")
    assert "--accumulation_steps" in capsys.readouterr().err


@pytest.mark.parametrize("config", [CoarseConfig(), RefineConfig(), VanillaConfig()])
def test_strips_are_no_part_of_the_identity(config):
    assert replace(config, split=ImageSplit(4)).identity() == config.identity()
    assert "split" not in config.identity()


@pytest.mark.slow
def test_whole_runs_go_in_strips_and_do_not_start_anew_without_them(
    scene, checkpoint, tmp_path, capsys
):
    strips = ("--gradient_accumulation", True, "--accumulation_steps", 3)
    assert brief_coarse(scene, checkpoint, tmp_path, *strips) == 0
    capsys.readouterr()
    assert brief_coarse(scene, checkpoint, tmp_path) == 0
    assert "finished already" in capsys.readouterr().out


def test_refinement_runs_in_strips(scene, checkpoint, tmp_path):
    mesh = tmp_path / "mesh.ply"
    write_mesh_ply(mesh, icosahedron())
    code = run_cli(
        train_refined.main,
        s=scene.root,
        c=checkpoint,
        m=mesh,
        f=2,
        o=tmp_path / "refined",
        gradient_accumulation=True,
    )
    assert code == 0
    assert list((tmp_path / "refined").rglob("2.pt"))


def test_weights_are_gradients_to_begin_with():
    leaf = torch.tensor([0.5, -2.0], requires_grad=True)
    backpropagate_weighted([leaf.square().sum(), leaf.double().prod()], [0.25, 3.0])
    found, leaf.grad = leaf.grad, None
    (0.25 * leaf.square().sum() + 3.0 * leaf.double().prod()).backward()
    torch.testing.assert_close(found, leaf.grad)
    # What is kept for the next time stays as it was.
    assert torch.equal(constants((0.25, 3.0), leaf.device), torch.tensor([0.25, 3.0]))
