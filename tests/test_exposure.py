# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs: what they do to an image, how they are learned, kept and passed on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import train_refined
from benchmarks.memory import Setting, weigh_setting
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.components.exposures import ExposureConfig, Exposures, LaterExposure
from gaussian_splatting.engine.reporting.evaluation import score_views
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.losses.exposure import exposed, fit_gain_and_offset
from gaussian_splatting.optim.visited_adam import BETAS
from gaussian_splatting.scenes.reference_layout import read_exposures, write_exposures
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.errors import UserError
from tests.support import training
from tests.support.brief_runs import brief_coarse
from tests.support.color_losses import l1_and_ssim
from tests.support.command_line import WITHOUT_VALUE
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import (
    assert_same_bits,
    disturbed_cloud,
    events,
    load_pt,
    make_tiny_scene,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.training import everywhere

ON = ExposureConfig(exposure_compensation=True, start=0, rate=0.01)
CPU = torch.device("cpu")
GAINS = (0.8, 1.0, 1.25)


def picture(height=20, width=17, seed=0):
    return torch.rand(height, width, 3, generator=torch.Generator().manual_seed(seed))


def exposures(config=ON, names=("a", "b", "c"), initial=None):
    return Exposures(config, names, CPU, (1, 100), initial)


# What an exposure does to an image


def test_no_exposure_is_the_same_image():
    image = picture()
    assert exposed(image, None) is image


def test_a_gain_multiplies_and_an_offset_adds():
    exposure = torch.tensor([[math.log(2.0), 0.0, 0.0], [0.0, 0.1, 0.0]])
    image = picture()
    expected = image * torch.tensor([2.0, 1.0, 1.0]) + torch.tensor([0.0, 0.1, 0.0])
    assert torch.allclose(exposed(image, exposure), expected, atol=1e-6)


def test_gradients_agree_with_finite_differences():
    image = picture(5, 4).double().requires_grad_(True)
    exposure = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(exposed, (image, exposure.requires_grad_(True)))


def test_the_colour_loss_of_an_exposed_image_agrees_with_the_float64_twin():
    def gradients(dtype):
        image = picture().to(dtype).requires_grad_(True)
        exposure = torch.tensor([[0.2, -0.1, 0.0], [0.05, 0.0, -0.02]], dtype=dtype)
        exposure.requires_grad_(True)
        l1, ssim = l1_and_ssim(exposed(image, exposure), picture(seed=1).to(dtype))
        (0.8 * l1 + 0.2 * (1 - ssim)).backward()
        return image.grad.double(), exposure.grad.double()

    for found, expected in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


def test_gain_and_offset_of_a_photograph_are_found_again():
    image, gain = picture(), torch.tensor([0.5, 1.5, 1.0])
    offset = torch.tensor([0.1, -0.2, 0.0])
    found = fit_gain_and_offset(image, image * gain + offset)
    assert torch.allclose(found[0], gain.double(), atol=1e-5)
    assert torch.allclose(found[1], offset.double(), atol=1e-5)


def test_a_flat_render_gets_an_offset_only():
    gain, offset = fit_gain_and_offset(torch.full((4, 5, 3), 0.25), picture(4, 5))
    assert gain.tolist() == [1.0] * 3
    assert torch.allclose(offset, picture(4, 5).double().mean(dim=(0, 1)) - 0.25)


def test_evaluation_after_gain_and_offset_forgives_an_exposure_and_nothing_else():
    camera, image = tiny_cameras(1)[0], picture(48, 64)
    photograph = (image * 200).round().to(torch.uint8)
    plain = score_views(lambda c: image, [camera], lambda c: photograph)
    scores = score_views(lambda c: image, [camera], lambda c: photograph, fitted=True)
    assert plain.fitted_psnr is None
    assert scores.psnr == plain.psnr < 20
    assert scores.fitted_psnr > 50


# How exposures are learned


def learn(learned, name, gradient, iteration):
    """One step that shows one photograph."""
    leaf = learned.leaf(name, iteration)
    leaf.grad = gradient
    learned.collect(name, leaf)
    learned.after_step(iteration)


def test_each_photograph_has_an_adam_of_its_own_and_the_mean_is_taken_out():
    ours = exposures()
    twins = {name: torch.zeros(2, 3, requires_grad=True) for name in "abc"}
    adams = {n: torch.optim.Adam([t], lr=1.0, betas=BETAS, eps=1e-15) for n, t in twins.items()}
    rng = torch.Generator().manual_seed(3)
    for iteration in range(1, 13):
        # The last photograph is seen less often than the others.
        name = "abaabbabcaba"[iteration - 1]
        gradient = torch.randn(2, 3, generator=rng)
        learn(ours, name, gradient, iteration)
        twins[name].grad = gradient
        adams[name].param_groups[0]["lr"] = 0.01 * 0.01 ** ((iteration - 1) / 99)
        adams[name].step()
        with torch.no_grad():
            values = torch.stack(list(twins.values()))
            mean = torch.stack([values[:, 0].exp().mean(dim=0).log(), values[:, 1].mean(dim=0)])
            for twin in twins.values():
                twin -= mean
    assert torch.allclose(ours.values, torch.stack(list(twins.values())).detach(), atol=1e-6)
    assert float((ours.values[:, 0].exp().mean(dim=0) - 1).abs().max()) < 1e-6
    assert float(ours.values[:, 1].mean(dim=0).abs().max()) < 1e-7


def test_nothing_is_learned_before_the_start_and_of_other_photographs():
    late = exposures(ExposureConfig(True, start=10))
    assert late.leaf("a", 10) is None
    assert late.leaf("a", 11) is not None
    assert late.leaf("held out", 11) is None
    late.collect("a", None)
    late.after_step(1)
    late.after_step(11)
    assert not late.values.any()


def test_at_the_end_exposures_stand_still():
    # The same gradient with changing signs: what is left is the size of a step.
    learned = exposures()
    values = []
    for iteration in range(1, 101):
        learn(learned, "a", torch.full((2, 3), (-1.0) ** iteration), iteration)
        values.append(learned.values[0].clone())
    first, last = (values[at + 1] - values[at] for at in (2, -2))
    assert 0 < float(last.abs().max()) < 0.03 * float(first.abs().max())


def test_a_short_schedule_starts_earlier_and_takes_larger_steps():
    short = VanillaConfig(exposure=ExposureConfig(True)).with_schedule(0.2).exposure
    assert (short.start, short.rate) == (200, pytest.approx(0.05))
    assert ExposureConfig(True).with_schedule(0.5).rate == pytest.approx(0.02)
    assert ExposureConfig(True).with_schedule(0.01).rate == 0.05
    assert ExposureConfig(True).with_schedule(2.0).rate == 0.01
    later = LaterExposure(True).with_schedule(0.5)
    assert (later.start, later.rate) == (0, 1e-3)


def test_a_saved_state_goes_on_with_the_same_bits():
    def learned(e, steps):
        for step in steps:
            learn(e, "ab"[step % 2], torch.full((2, 3), 0.1 + step), 1 + step)
        return e

    straight = learned(exposures(), range(9))
    first, second = learned(exposures(), range(4)), exposures()
    second.load_state(first.state())
    assert torch.equal(learned(second, range(4, 9)).values, straight.values)
    assert straight.state().keys() == second.state().keys()
    for name, value in straight.state().items():
        assert torch.equal(value, second.state()[name])


def test_the_file_of_exposures_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "exposure.json"
    written = {"a b.png": torch.randn(2, 3), "ü.jpg": torch.zeros(2, 3)}
    write_exposures(path, written)
    read = read_exposures(path, pytest.fail)
    assert read.keys() == written.keys()
    for name, value in written.items():
        assert torch.allclose(read[name], value, atol=1e-7)
    assert read_exposures(tmp_path / "none.json", pytest.fail) == {}


@pytest.mark.parametrize(
    "value", [[], {"a": 1}, {"a": [[-1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}]
)
def test_a_file_that_is_no_table_of_exposures_is_refused_in_one_line(tmp_path, value):
    path = tmp_path / "exposure.json"
    path.write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        read_exposures(path, pytest.fail)
    assert "\n" not in str(caught.value)


def test_strips_give_the_gradient_of_the_whole_image(tmp_path):
    camera = tiny_cameras(1)[0]
    found = []
    for strips in (1, 3):
        learned = exposures(names=(camera.name,))
        stage = VanillaStage(
            disturbed_cloud(tiny_cloud()),
            VanillaConfig(split=ImageSplit(strips)),
            everywhere(3.0),
            tmp_path,
            components=[learned],
        )
        training.learn(stage, 1, camera, picture(48, 64))
        found.append(learned.statistics()[0])
    assert float((found[0] - found[1]).abs().max()) < 1e-5 * float(found[0].abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["entropy", "refine"])
def test_foretold_memory_counts_exposures(phase):
    size = {"n": 20_000, "width": 320, "height": 240, "samples": 20_000, "sample_chunk": 20_000}
    weight = weigh_setting(Setting(phase, **size, exposure=True))
    assert weight.predicted == pytest.approx(weight.peak, rel=0.1)


# Runs


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """The tiny scene, photographed with three exposures in turn."""
    scene = make_tiny_scene(tmp_path_factory.mktemp("changing") / "scene")
    for number, camera in enumerate(scene.cameras):
        pixels = np.asarray(Image.open(camera.image_path), dtype=np.float64)
        changed = (pixels * GAINS[number % 3]).clip(0, 255).round().astype(np.uint8)
        Image.fromarray(changed).save(camera.image_path)
    return scene


def vanilla(scene, output, *more):
    code = run_cli(
        vanilla_train.main,
        *more,
        s=scene.root,
        m=output,
        eval=WITHOUT_VALUE,
        iterations=60,
        schedule_scale=0.005,
        test_iterations=30,
        checkpoint_interval=20,
        densify_until_iter=1,
        opacity_reset_interval=99_999,
    )
    assert code == 0
    return output


@pytest.fixture(scope="module")
def learned(changing, tmp_path_factory):
    """A vanilla checkpoint that learned exposures."""
    return vanilla(changing, tmp_path_factory.mktemp("v") / "on", "--exposure_compensation")


@pytest.mark.slow
def test_brighter_photographs_get_larger_gains(learned):
    table = read_exposures(learned / "point_cloud" / "iteration_60" / "exposure.json", print)
    gains = [
        np.mean([float(e[0].mean()) for name, e in table.items() if int(name[5:7]) % 3 == k])
        for k in range(3)
    ]
    assert gains[0] < gains[1] < gains[2]
    assert len(table) == 8


def test_both_figures_and_the_range_are_reported(learned, capsys):
    run = learned / "checkpoints"
    log = (run / "log.txt").read_text()
    assert "PSNR after gain and offset" in log
    assert "gains of the training photographs" in log
    figures = json.loads((run / "run.json").read_text())["figures"]
    assert figures["held-out PSNR after gain and offset"] >= figures["held-out PSNR"]
    assert "Test/PSNR after gain and offset" in events(run).Tags()["scalars"]
    assert "PSNR after gain and offset" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_without_the_flag_has_none_of_it(changing, tmp_path):
    output = vanilla(changing, tmp_path / "off")
    assert "gain" not in (output / "checkpoints" / "log.txt").read_text()
    record = json.loads((output / "checkpoints" / "run.json").read_text())
    assert "exposure" not in record["settings"]
    assert not list(output.rglob("exposure.json"))
    state = load_pt(output / "checkpoints" / "60.pt")["resume"]["stage"]
    assert state.keys() == {"gradient_sum", "views"}


@pytest.mark.slow
def test_a_continued_vanilla_run_has_the_same_bits(changing, learned, tmp_path):
    source = learned / "checkpoints" / "20.pt"
    again = vanilla(changing, tmp_path / "v", "--exposure_compensation", "--resume", source)
    assert_same_bits(learned / "checkpoints" / "60.pt", again / "checkpoints" / "60.pt")


def coarse(scene, checkpoint, output, *more):
    return brief_coarse(
        scene,
        checkpoint,
        output,
        *more,
        i=60,
        schedule_scale=0.002,
        sdf_samples=300,
        checkpoint_milestones=10_000,
        force=True,
    )


@pytest.mark.slow
def test_the_coarse_stage_goes_on_with_the_exposures_and_resumes(
    changing, learned, tmp_path, capsys
):
    assert coarse(changing, learned, tmp_path / "a", "--exposure_compensation", True) == 0
    assert "exposures: 8 of 8 taken over from" in capsys.readouterr().out
    (straight,) = (tmp_path / "a").rglob("30.pt")
    run = straight.parent
    source = run / "20.pt"
    more = ("--exposure_compensation", True, "--resume", source)
    assert coarse(changing, learned, tmp_path / "b", *more) == 0
    (again,) = (tmp_path / "b").rglob("30.pt")
    assert_same_bits(straight, again)
    before = load_pt(learned / "checkpoints" / "60.pt")["resume"]["stage"]
    after = load_pt(straight)["resume"]["stage"]
    name = "exposure of view_01.png"
    assert float((after[name][0] - before[name][0]).abs().max()) < 0.1


@pytest.mark.slow
def test_exposures_of_the_checkpoint_that_are_not_used_are_named(
    changing, learned, tmp_path, capsys
):
    assert coarse(changing, learned, tmp_path, "--exposure_compensation", False) == 0
    assert "trained with exposures" in capsys.readouterr().out


@pytest.mark.slow
def test_the_fast_preset_goes_on_with_exposures_of_the_checkpoint(
    changing, learned, tmp_path, capsys
):
    assert coarse(changing, learned, tmp_path) == 0
    assert "exposures: 8 of 8 taken over from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "differ", "on"),
    [("auto", True, True), ("auto", False, False), (False, True, False), (True, False, True)],
)
def test_what_is_asked_for_wins_over_what_is_measured(asked, differ, on):
    config = ExposureConfig(exposure_compensation=asked).resolved(differ)
    assert config.exposure_compensation is on


@pytest.mark.slow
def test_the_refinement_learns_exposures_and_resumes(changing, learned, tmp_path):
    mesh = tmp_path / "sugarmesh_ball.ply"
    write_mesh_ply(mesh, icosahedron())

    def refine(output, *more):
        assert (
            run_cli(
                train_refined.main,
                *more,
                s=changing.root,
                c=learned,
                i=60,
                m=mesh,
                g=3,
                v=300,
                f=12,
                checkpoint_interval=4,
                exposure_compensation=WITHOUT_VALUE,
                o=output,
            )
            == 0
        )
        return next(output.rglob("12.pt"))

    straight = refine(tmp_path / "a")
    again = refine(tmp_path / "b", "--resume", straight.with_name("4.pt"))
    assert_same_bits(straight, again)
    assert "exposure of view_01.png" in load_pt(again)["resume"]["stage"]


def test_only_pixels_of_the_object_say_what_its_exposure_is():
    image, exposure = torch.rand(6, 5, 3), torch.tensor([[0.2, 0.1, 0.0], [0.1, 0.0, -0.1]])
    inside = torch.zeros(6, 5, dtype=torch.bool)
    inside[2:4, 1:3] = True
    leaves = [exposure.clone().requires_grad_() for _ in range(2)]
    shown = exposed(image, leaves[0], inside)
    assert torch.equal(shown, exposed(image, exposure))
    shown.square().sum().backward()
    exposed(image, leaves[1])[inside].square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
