# SPDX-License-Identifier: Apache-2.0
"""Images that grow while Gaussians are added: schedule, photographs, budget, runs."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch

from gaussian_splatting.components.growing_resolution import (
    FIRST_GUESS,
    LEVELS,
    GrowingResolution,
    GrowthConfig,
    ResolutionGrowth,
    measured_growth,
    spectrum_shares,
)
from gaussian_splatting.data.images import ImageStore, composited
from gaussian_splatting.engine.view_sampling import SizedViews, averaged
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from tests.support.brief_runs import brief_vanilla
from tests.support.tiny_scene import assert_same_bits, make_tiny_scene, tiny_cameras

NOISE = np.random.default_rng(0).normal(size=(96, 128))


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return make_tiny_scene(tmp_path_factory.mktemp("growing") / "scene")


# Photographs


def test_a_smaller_photograph_has_means_and_its_mask_weighs_colours():
    whole = torch.randint(0, 256, (12, 8, 4), dtype=torch.uint8)
    whole[:2, :2, 3] = 0
    found = averaged(whole, 4, 6)
    blocks = whole.double().reshape(6, 2, 4, 2, 4)
    colors, mask = blocks[..., :3], blocks[..., 3:]
    weighted = (colors * mask).mean(dim=(1, 3)) / mask.mean(dim=(1, 3))
    weighted[0, 0] = colors[0, :, 0].mean(dim=(0, 1))
    expected = torch.cat([weighted, mask.mean(dim=(1, 3))], dim=-1)
    assert found.shape == (6, 4, 4)
    assert torch.equal(found[..., 3].double(), expected[..., 3].round())
    assert (found.double() - expected).abs().max() <= 0.51
    assert torch.equal(averaged(whole[..., :3], 4, 6).double(), colors.mean(dim=(1, 3)).round())
    assert torch.equal(averaged(whole, 8, 12), whole)


@pytest.mark.parametrize("background", [0, 255])
def test_a_smaller_cut_out_looks_like_the_smaller_picture_of_it(background):
    cut_out = torch.zeros(32, 32, 4, dtype=torch.uint8)
    y, x = np.mgrid[:32, :32]
    cut_out[torch.from_numpy((x - 15.3) ** 2 + (y - 16.1) ** 2 < 100)] = 230
    cut_out[..., 3] = torch.where(cut_out[..., 3] > 0, 255, 0)
    plain = torch.full((3,), background, dtype=torch.uint8)
    shown = averaged(composited(cut_out, plain), 8, 8).int()
    assert (composited(averaged(cut_out, 8, 8), plain).int() - shown).abs().max() <= 1


def test_a_smaller_photograph_counts_parts_of_pixels():
    ramp = torch.arange(0, 250, 10, dtype=torch.uint8)[None, :, None].expand(3, -1, 3)
    found = averaged(ramp.contiguous(), 10, 3)
    # 2.5 pixels each: the means of a ramp are a ramp.
    assert torch.equal(found[0, :, 0].double().diff().round(), torch.full((9,), 25.0).double())


def test_views_of_a_size_are_kept_for_that_size_only(scene):
    camera = scene.cameras[0]
    with ImageStore() as images:
        views = SizedViews(images)
        full, photograph = views.get(camera, 1.0)
        assert full is camera
        assert photograph is images.get(camera)
        small, copy = views.get(camera, 0.5)
        assert (small.width, small.height) == (camera.width // 2, camera.height // 2)
        assert small.fx == pytest.approx(camera.fx / 2)
        assert small.cx == pytest.approx(camera.cx / 2)
        assert copy.shape == (small.height, small.width, 3)
        assert views.get(camera, 0.5)[1] is copy
        assert views.get(camera, 1.0)[1] is photograph
        assert views.get(camera, 0.5)[1] is not copy


@pytest.mark.parametrize("n_kept", [3, 10])
def test_small_copies_stay_under_the_budget_of_the_photographs(scene, n_kept):
    camera, n = scene.cameras[0], len(scene.cameras)
    whole = 3 * camera.width * camera.height
    budget = whole + n_kept * whole // 4
    with ImageStore(budget_bytes=budget) as images:
        views = SizedViews(images)
        copies = []
        for each in scene.cameras * 3:
            views.prefetch(each)
            copies.append(weakref.ref(views.get(each, 0.5)[1]))
            kept = {id(copy): copy for ref in copies if (copy := ref()) is not None}
            assert sum(copy.nbytes for copy in kept.values()) <= images.n_bytes <= budget
            del kept
        if n_kept >= n:
            # Whole photographs make room for copies, which are made once.
            assert len({id(ref()) for ref in copies}) == n
            assert images.n_bytes >= n * whole // 4
        views.get(camera, 1.0)
        assert images.n_bytes <= 2 * whole


def test_a_view_has_a_pixel_at_least():
    small = tiny_cameras(1)[0].resized(3, 1).scaled(1 / 16)
    assert (small.width, small.height) == (1, 1)


# Schedule


def test_noise_fills_its_spectrum_evenly_and_smooth_pictures_fill_its_middle():
    shares = spectrum_shares([NOISE])
    expected = (np.arange(1, LEVELS + 1) / LEVELS) ** 2
    np.testing.assert_allclose(shares, expected, atol=0.03)
    wave = np.cos(np.arange(128) / 128 * 2 * np.pi * 3)[None, :].repeat(96, axis=0)
    # Three periods across 128 pixels need 6 of them.
    assert spectrum_shares([wave])[0] == pytest.approx(1.0)
    np.testing.assert_allclose(
        spectrum_shares([NOISE, wave]), (np.array(shares) + 1) / 2, atol=1e-9
    )


def test_a_plain_picture_has_no_detail_to_wait_for():
    shares = spectrum_shares([np.full((20, 30), 0.7)])
    assert shares == [1.0] * LEVELS


def test_sizes_follow_the_share_of_the_spectrum_and_never_shrink():
    shares = np.linspace(1 / LEVELS, 1, LEVELS)
    growth = ResolutionGrowth.of(shares, 1_600, 4)
    scales = [growth.scale(i) for i in range(1, 3_000)]
    assert scales[0] == 4 / LEVELS
    assert scales == sorted(scales)
    assert [growth.scale(i) for i in (400, 401, 500, 501)] == [0.25, 0.3125, 0.3125, 0.375]
    # An image holds as much of the spectrum as the schedule has passed.
    assert all(growth.scale(i) >= i / 1_600 for i in range(1, 1_600))
    assert growth.scale(1_501) == growth.scale(10**9) == 1.0


def test_the_spectrum_of_the_photographs_decides(scene):
    with ImageStore() as images:
        config = GrowthConfig(growing_resolution=True)
        found = measured_growth(scene.cameras, images.shown, config, 1_000)
        grey = [images.get(c).double().mean(dim=-1).numpy() for c in scene.cameras]
    expected = ResolutionGrowth.of(
        spectrum_shares(grey), round(1_000 * config.small_until), config.smallest
    )
    assert found == expected


def test_small_photographs_have_their_full_size_earlier():
    config = GrowthConfig(growing_resolution=True)
    camera = tiny_cameras(1)[0]
    sizes = {(100, 80): 0.5, (400, 240): 0.75, (400, 320): 1.0, (6_000, 4_000): 1.0}
    for (width, height), until in sizes.items():
        cameras = [camera.resized(width, height)] * 2
        assert config.until_of(cameras) == pytest.approx(until)
    mixed = [camera.resized(400, 320), camera.resized(400, 160)]
    assert config.until_of(mixed) == pytest.approx(0.75)


def test_the_budget_is_that_of_the_paper():
    growth = ResolutionGrowth((100, 200, 300, 400))
    budget = GrowingResolution(growth, 1_000)
    last = FIRST_GUESS * 1_000
    # At 150 of 400 images are 13 sixteenths as large.
    expected = 1_000 + (last - 1_000) / (16 / 13) ** (2 - 150 / 400)
    assert budget.allowed(150, 0) == int(expected)
    assert budget.allowed(401, 0) == last
    # What a round asks for comes on top of most of what was expected.
    assert budget.allowed(401, 800) == pytest.approx(0.98 * last + 800)
    assert GrowingResolution(growth, 1_000).allowed(401, 10) == last


def test_a_budget_survives_a_checkpoint():
    growth = ResolutionGrowth((100,))
    before, after = GrowingResolution(growth, 1_000), GrowingResolution(growth, 77)
    before.allowed(50, 4_000)
    after.load_state(before.state())
    assert after.allowed(60, 1_234) == before.allowed(60, 1_234)


def test_unless_asked_for_nothing_grows_and_no_run_has_another_name():
    assert not {"growth", "scoring"} & VanillaConfig().identity().keys()
    asked = VanillaConfig(growth=GrowthConfig(growing_resolution=True)).identity()
    assert asked["growth"]["until"] == GrowthConfig.until


# Runs


def vanilla(scene, output, *more) -> None:
    code = brief_vanilla(
        scene,
        output,
        *more,
        iterations=32,
        densify_until_iter=28,
        opacity_reset_interval=99,
        checkpoint_iterations=6,
    )
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--densification", "scored", "--views_per_step", 2)])
def test_a_growing_run_continues_with_the_same_bits(scene, tmp_path, more):
    flags = ("--growing_resolution", *more)
    vanilla(scene, tmp_path / "a", *flags)
    vanilla(scene, tmp_path / "b", *flags, "--resume", tmp_path / "a" / "checkpoints" / "6.pt")
    assert_same_bits(*(tmp_path / name / "checkpoints" / "32.pt" for name in "ab"))


@pytest.mark.slow
def test_images_grow_and_are_measured_at_full_size(scene, tmp_path, monkeypatch):
    seen, rendered = [], set()
    accumulate, render = VanillaStage.accumulate, VanillaStage.render

    def watched(self, view, resources):
        camera = view.camera
        assert view.photograph.shape[:2] == (camera.height, camera.width)
        seen.append((camera.width, camera.height))
        return accumulate(self, view, resources)

    def watched_render(self, camera, *, geometry):
        rendered.add((camera.width, camera.height))
        return render(self, camera, geometry=geometry)

    monkeypatch.setattr(VanillaStage, "accumulate", watched)
    monkeypatch.setattr(VanillaStage, "render", watched_render)
    vanilla(scene, tmp_path / "out", "--growing_resolution", "True")
    full = (scene.cameras[0].width, scene.cameras[0].height)
    assert seen[0][0] == round(full[0] * GrowthConfig.smallest / LEVELS)
    assert seen == sorted(seen)
    assert seen[-1] == full
    assert rendered == {full}
    record = json.loads((tmp_path / "out" / "checkpoints" / "run.json").read_text())
    assert record["settings"]["growth"]["growing_resolution"] is True
