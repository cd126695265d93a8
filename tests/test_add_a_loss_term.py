# SPDX-License-Identifier: Apache-2.0
"""The recipe "Add a loss term" of DOCS/ARCHITECTURE.md, carried out: one more entry in a table."""

from __future__ import annotations

import math
import re

import pytest
import torch

from gaussian_splatting.engine.loss_terms import LossTerm
from sugar_trainers import coarse_stage as coarse
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.losses import opacity_entropy
from sugar_trainers.stage_config import REGULARIZATIONS, CoarseConfig, CoarseSchedule
from sugar_trainers.terms import coarse_terms
from tests.support.brief_runs import brief_coarse
from tests.support.tiny_scene import disturbed_cloud, events, tiny_cameras, tiny_cloud
from tests.support.training import accumulate, everywhere

WEIGHT = 0.25
START = 14
"""First iteration of a run at a scale of 0.002."""


def smallness(seen):
    """Of the model: the mean of the largest deviations."""
    return seen.gaussians.scales.amax(dim=1).mean()


def thinness(chunk):
    """At samples: the mean distance to the plane, the share of a chunk."""
    return chunk.fields.plane_distance.abs().sum() / chunk.total


def darkness(strip):
    """Of the image: its mean, the share of a strip."""
    color = strip.color
    return color[strip.counted_rows].sum() / (strip.height * color.shape[1] * 3)


def flatness(strip):
    """Of the rendered depth, which no other term reads with this regularisation."""
    depth = strip.depth
    return depth[strip.counted_rows].sum() / (strip.height * depth.shape[1])


ENTRIES = {
    "model": lambda value=smallness, **when: LossTerm("added", WEIGHT, "model", value, **when),
    "samples": lambda value=thinness, **when: LossTerm("added", WEIGHT, "samples", value, **when),
    "image": lambda value=darkness, **when: LossTerm("added", WEIGHT, "image", value, **when),
    "image with depth": lambda value=flatness, **when: LossTerm(
        "added", WEIGHT, "image", value, maps=("depth",), **when
    ),
}


def add(monkeypatch, term):
    """Add one entry to the table of the coarse stage, as a developer would."""
    monkeypatch.setattr(coarse, "coarse_terms", lambda config: (*coarse_terms(config), term))


def train_coarse(scene, checkpoint, output):
    short = {"schedule_scale": 0.002, "sdf_samples": 300}
    return brief_coarse(scene, checkpoint, output, r="density", **short)


def one_step(iteration=9_100, **settings):
    """Terms and gradients of a step in which every term acts."""
    schedule = CoarseSchedule(entropy_stop=9_500)
    config = CoarseConfig("density", schedule, sdf_samples=500, **settings)
    stage = CoarseStage(disturbed_cloud(tiny_cloud()), config, everywhere(3.0), print)
    stage.begin(iteration)
    terms = accumulate(stage, iteration, tiny_cameras(1)[0], torch.zeros(48, 64, 3)).terms
    return terms, stage.model.optimizer.gradients()


@pytest.mark.parametrize("place", ENTRIES)
def test_an_entry_is_in_the_weighted_sum_and_in_the_gradients(place, monkeypatch):
    terms, gradients = one_step()
    add(monkeypatch, ENTRIES[place]())
    with_added, other_gradients = one_step()
    assert with_added.keys() == terms.keys() | {"added"}
    expected = float(terms["loss"]) + WEIGHT * float(with_added["added"])
    assert float(with_added["loss"]) == pytest.approx(expected, rel=1e-6)
    assert any(not torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_the_gradient_is_that_of_the_weighted_value(monkeypatch):
    """Measured where the gradient is known: the mean of all opacities, which nothing else moves."""
    _, before = one_step()
    add(monkeypatch, LossTerm("added", WEIGHT, "model", lambda s: s.gaussians.sh_dc.mean()))
    _, after = one_step()
    n = after["sh_dc"].numel()
    torch.testing.assert_close(
        after["sh_dc"] - before["sh_dc"],
        torch.full_like(after["sh_dc"], WEIGHT / n),
        rtol=1e-3,
        atol=1e-8,
    )


def test_an_entry_acts_when_its_schedule_says_so(monkeypatch):
    add(monkeypatch, ENTRIES["model"](active=lambda iteration: iteration > 9_200))
    assert "added" not in one_step(9_100)[0]
    assert "added" in one_step(9_201)[0]


def test_a_value_of_none_leaves_the_term_out(monkeypatch):
    terms, _ = one_step()
    add(monkeypatch, ENTRIES["model"](lambda seen: None))
    assert one_step()[0] == terms


@pytest.mark.slow
def test_an_entry_is_in_the_log_and_in_the_curves(scene, checkpoint, tmp_path, monkeypatch):
    add(monkeypatch, ENTRIES["model"](active=lambda iteration: iteration > START + 2))
    assert train_coarse(scene, checkpoint, tmp_path) == 0
    [log] = [path for path in tmp_path.rglob("log.txt") if (path.parent / "run.json").is_file()]
    shown = re.findall(r" (\d+)/30 .* loss .* added (\d\.\d{4}) ", log.read_text())
    curve = {point.step: point.value for point in events(log.parent).Scalars("Loss/added")}
    assert list(curve) == list(range(START + 3, 31))
    assert int(shown[-1][0]) == 30
    assert all(f"{curve[int(iteration)]:.4f}" == value for iteration, value in shown)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "samples", "image"])
def test_an_entry_that_is_no_number_is_named(
    place, scene, checkpoint, tmp_path, monkeypatch, capsys
):
    good = ENTRIES[place]()
    add(monkeypatch, ENTRIES[place](lambda seen: good.value(seen) * math.nan))
    assert train_coarse(scene, checkpoint, tmp_path) == 3
    error = capsys.readouterr().err
    assert "loss term added is nan at iteration" in error
    assert "Traceback" not in error


def test_a_function_of_losses_is_a_value(monkeypatch):
    """The recipe's first step: a pure function of tensors, here one that is there already."""
    add(monkeypatch, ENTRIES["model"](lambda seen: opacity_entropy(seen.gaussians.opacities)))
    terms, _ = one_step()
    assert float(terms["added"]) == pytest.approx(float(terms["entropy"]), rel=1e-6)


@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_names_in_a_table_are_unique(mode):
    names = [term.name for term in coarse_terms(CoarseConfig(mode))]
    assert len(set(names)) == len(names)
