# SPDX-License-Identifier: Apache-2.0
"""Pruning scores of Gaussians, and the densification that uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gaussian_splatting.components.densification import DensificationConfig
from gaussian_splatting.components.growing_resolution import GrowthConfig
from gaussian_splatting.components.pruning_scores import PruningScores, ScoreConfig
from gaussian_splatting.components.sky_sphere import RobustConfig
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.rasterization import project, rasterize
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from tests.support.brief_runs import brief_vanilla
from tests.support.reference_rasterizer import rasterize_reference
from tests.support.tiny_scene import (
    assert_same_bits,
    disturbed_cloud,
    make_tiny_scene,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.training import everywhere, learn

EXTENT = 3.0
SCORED = ScoreConfig("scored")
RULES = DensificationConfig(densify_from_iter=1, densification_interval=20)
ROUND, BEFORE = 40, 35
CPU = torch.device("cpu")


def photograph(camera):
    with torch.no_grad():
        image = rasterize(tiny_cloud().activate(), camera).image
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def stage_of(**config) -> VanillaStage:
    return VanillaStage(
        disturbed_cloud(tiny_cloud()),
        VanillaConfig(**{"scoring": SCORED, "densification": RULES, **config}),
        everywhere(EXTENT),
        print,
    )


def look(stage: VanillaStage, camera, target=None, iteration: int = BEFORE) -> None:
    target = photograph(camera) if target is None else target
    learn(stage, iteration, camera, target)


def scores_of(stage: VanillaStage) -> torch.Tensor:
    """Pixels in error, pixels, and views of the step so far. (N, 3)"""
    return stage.step_statistics()[1]


def doubles(gaussians):
    return Gaussians(*(value.detach().double() for value in gaussians.tensors()))


def counted_by_hand(camera, wrong: torch.Tensor) -> torch.Tensor:
    """The sums of one view by a dense float64 renderer: one feature for each Gaussian. (N, 2)"""
    gaussians = doubles(disturbed_cloud(tiny_cloud()).activate())
    own = torch.eye(len(gaussians), dtype=torch.float64)
    weights = rasterize_reference(gaussians, camera, features=own, sh_degree=0).features
    return torch.stack([(weights * wrong[..., None]).sum(dim=(0, 1)), weights.sum(dim=(0, 1))], 1)


def wrong_pixels(camera, target) -> torch.Tensor:
    with torch.no_grad():
        gaussians = disturbed_cloud(tiny_cloud()).activate()
        image = rasterize(gaussians, camera, sh_degree=0).image
    return ((image - target[..., :3] / 255.0).abs().mean(dim=-1) > SCORED.error).double()


# What is found


def test_sums_are_those_of_a_dense_renderer():
    camera = tiny_cameras(1)[0]
    stage = stage_of()
    look(stage, camera)
    found, wrong = scores_of(stage), wrong_pixels(camera, photograph(camera))
    assert 0.01 < float(wrong.mean()) < 0.9
    expected = counted_by_hand(camera, wrong)
    torch.testing.assert_close(found[:, :2].double(), expected, rtol=1e-3, atol=1e-3)
    assert float(expected[:, 0].max()) > 1
    assert torch.equal(found[:, 2] > 0, expected[:, 1] > 0) or bool((found[:, 2] <= 1).all())


def test_pixels_that_a_mask_leaves_out_are_not_wrong():
    camera, stage = tiny_cameras(1)[0], stage_of()
    target = photograph(camera)
    counts = torch.zeros_like(target[..., :1])
    counts[:, : camera.width // 2] = 255
    look(stage, camera, torch.cat([target, counts], dim=-1))
    wrong = wrong_pixels(camera, target)
    wrong[:, camera.width // 2 :] = 0
    torch.testing.assert_close(
        scores_of(stage)[:, 0].double(), counted_by_hand(camera, wrong)[:, 0], rtol=1e-3, atol=1e-3
    )


def test_asking_changes_no_gradient():
    camera, asked, unasked = tiny_cameras(1)[0], stage_of(), stage_of(scoring=ScoreConfig())
    for stage in (asked, unasked):
        look(stage, camera)
    assert [len(stage.step_statistics()) for stage in (asked, unasked)] == [2, 1]
    for name, value in unasked.model.optimizer.gradients().items():
        found = asked.model.optimizer.gradients()[name]
        # Kernels of another number of channels may round otherwise.
        assert float((found - value).norm()) <= 1e-6 * float(value.norm()), name


@pytest.mark.parametrize("split", [ImageSplit(3), ImageSplit(48)])
def test_strips_find_what_the_whole_image_finds(split):
    camera, whole, strips = tiny_cameras(1)[0], stage_of(), stage_of(split=split)
    for stage in (whole, strips):
        look(stage, camera)
    torch.testing.assert_close(scores_of(strips), scores_of(whole), rtol=1e-5, atol=1e-5)


def test_two_looks_have_the_same_bits_and_views_add_up():
    cameras, together = tiny_cameras(2), stage_of()
    apart = [stage_of() for _ in range(3)]
    for stage, camera in zip(apart, [*cameras, cameras[0]], strict=True):
        look(stage, camera)
    for camera in cameras:
        look(together, camera)
    assert torch.equal(scores_of(apart[0]), scores_of(apart[2]))
    assert torch.equal(scores_of(together), scores_of(apart[0]) + scores_of(apart[1]))


@pytest.mark.parametrize(
    ("views_per_step", "asked"), [(1, range(31, 41)), (4, range(38, 41)), (100, range(40, 41))]
)
def test_the_last_ten_views_before_a_round_are_asked(views_per_step, asked):
    scores = PruningScores(5, CPU, SCORED, RULES, 10_000, views_per_step)
    found = [i for i in range(21, 41) if scores.collects(i)]
    assert found == list(asked)


def test_before_and_after_densification_nobody_is_asked():
    rules = replace(RULES, densify_from_iter=20, densify_until_iter=40)
    scores = PruningScores(5, CPU, SCORED, rules, 10_000)
    assert not any(scores.collects(i) for i in range(1, 100))
    scores = PruningScores(5, CPU, SCORED, replace(rules, densify_until_iter=41), 10_000)
    assert [i for i in range(1, 100) if scores.collects(i)] == [*range(31, 41)]


# What follows


def judged(wrong, shown, views, until=10_000) -> PruningScores:
    scores = PruningScores(len(wrong), CPU, SCORED, RULES, until)
    columns = [torch.as_tensor(v, dtype=torch.float32) for v in (wrong, shown, views)]
    scores.sums.total = torch.stack(columns, dim=1)
    return scores


def test_only_gaussians_that_show_wrong_pixels_in_the_mean_may_grow():
    # Three Gaussians that were seen in seven views show 14 pixels, two in each.
    enough = 2 * SCORED.wrong_share
    wrong, shown = [3.01 * enough, 2.9 * enough, 0, 1.01 * enough], [9, 3, 0, 2]
    assert judged(wrong, shown, [3, 3, 0, 1]).may_grow().tolist() == [True, False, False, True]


def test_who_may_grow_does_not_depend_on_the_size_of_images():
    rng = torch.Generator().manual_seed(0)
    shown, views = torch.rand(50, generator=rng) * 9, torch.randint(1, 4, (50,), generator=rng)
    wrong = shown * torch.rand(50, generator=rng)
    large, small = (judged((k * wrong).tolist(), (k * shown).tolist(), views) for k in (1.0, 0.25))
    assert 0 < int(large.may_grow().sum()) < 50
    assert torch.equal(large.may_grow(), small.may_grow())


def test_nobody_grows_where_nothing_was_seen():
    assert judged([0, 0], [0, 0], [0, 0]).may_grow().tolist() == [False, False]


def test_gaussians_grow_where_pixels_are_wrong_and_nowhere_else():
    camera, grown = tiny_cameras(1)[0], {}
    for name, scoring in (("reference", ScoreConfig()), ("scored", SCORED)):
        stage = stage_of(scoring=scoring, densification=replace(RULES, densify_grad_threshold=1e-9))
        places = project(stage.model.cloud.activate(), camera).means2d[:, 0]
        n = len(stage.model)
        # The left half is as it is rendered, the right half is not.
        target = (stage.render(camera, geometry=False).image.clamp(0, 1) * 255).byte()
        target[:, camera.width // 2 :] = 255 - target[:, camera.width // 2 :]
        look(stage, camera, target)
        stage.apply(ROUND)
        assert len(stage.model) == n
        stage.begin(ROUND + 1)
        grown[name] = len(stage.model) - n
    right = int((places > camera.width / 2 - 10).sum())
    assert 0 < grown["scored"] <= right < grown["reference"]


@pytest.mark.parametrize(
    ("iteration", "removes"), [(20, False), (40, True), (60, False), (80, True), (100, False)]
)
def test_faint_gaussians_that_show_next_to_nothing_go_at_a_few_times(iteration, removes):
    least = SCORED.shown_pixels
    scores = judged([9] * 5, [3 * least, 2.9 * least, 0, 0, 0], [3, 3, 1, 0, 1], until=100)
    opacities = torch.tensor([0, 0, 0.99 * SCORED.faint, 0, SCORED.faint])
    scores._config = replace(SCORED, removals=(0.6, 1.0))
    found = scores.unused(opacities, iteration)
    if removes:
        assert found.tolist() == [False, True, True, False, False]
    else:
        assert found is None


def resolved_parts(config: VanillaConfig, *, object_alone: bool = False) -> tuple[bool, ...]:
    """Whether it scores, whether images grow, and whether it begins robustly."""
    config = config.resolved(object_alone)
    return config.scores, config.growth.growing_resolution, config.robustness.robust


def test_a_flag_that_is_given_wins_over_the_preset():
    fast = VanillaConfig(preset="fast")
    assert resolved_parts(VanillaConfig()) == (False, False, False)
    assert resolved_parts(fast) == (True, True, True)
    assert resolved_parts(replace(fast, scoring=ScoreConfig("reference"))) == (False, True, True)
    assert resolved_parts(replace(fast, growth=GrowthConfig(False))) == (True, False, True)
    assert resolved_parts(replace(fast, robustness=RobustConfig(False))) == (True, True, False)


def test_of_an_object_alone_the_preset_takes_the_score_and_flags_take_the_rest():
    fast = VanillaConfig(preset="fast")
    assert resolved_parts(fast, object_alone=True) == (True, False, False)
    asked = replace(fast, growth=GrowthConfig(True), robustness=RobustConfig(True))
    assert resolved_parts(asked, object_alone=True) == (True, True, True)


def test_a_run_is_named_by_what_it_does_not_by_its_preset():
    fast = VanillaConfig(preset="fast")
    by_hand = VanillaConfig(
        scoring=SCORED, growth=GrowthConfig(True), robustness=RobustConfig(True)
    )
    nothing = replace(
        fast,
        scoring=ScoreConfig("reference"),
        growth=GrowthConfig(False),
        robustness=RobustConfig(False),
    )
    assert fast.resolved(False).identity() == by_hand.resolved(False).identity()
    assert nothing.resolved(False).identity() == VanillaConfig().identity()
    assert VanillaConfig().resolved(False).identity() == VanillaConfig().identity()


# Runs


def vanilla(scene, output, *more) -> int:
    return brief_vanilla(scene, output, *more, checkpoint_iterations=10)


def final(output):
    return output / "checkpoints" / "24.pt"


@pytest.mark.slow
def test_a_scored_run_repeats_and_continues_with_the_same_bits(tmp_path):
    scene = make_tiny_scene(tmp_path / "scene")
    assert vanilla(scene, tmp_path / "a", "--densification", "scored") == 0
    assert vanilla(scene, tmp_path / "again", "--densification", "scored") == 0
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "again"))
    # In the middle of what is added up for the round of iteration 12.
    source = tmp_path / "a" / "checkpoints" / "10.pt"
    assert float(torch.load(source)["resume"]["stage"]["pruning_scores"].sum()) > 0
    assert vanilla(scene, tmp_path / "b", "--densification", "scored", "--resume", source) == 0
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))


def test_a_score_that_is_unknown_is_refused_in_one_line(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    assert vanilla(scene, tmp_path / "a", "--densification", "often") == 2
    assert "--densification" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "a").exists()
