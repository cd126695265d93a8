# SPDX-License-Identifier: Apache-2.0
"""The recipe "Add a component" of DOCS/ARCHITECTURE.md, carried out: a number per photograph.

The class below would be one new file, and `add` one line where the stage is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gaussian_splatting.engine.component import Component, ComponentReport, Figure, ViewResult
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.state_schema import ANY, StateRule
from gaussian_splatting.engine.training_views import AddedLoss, ImageStrip, TrainingView
from gaussian_splatting.vanilla import vanilla_run
from tests.support.tiny_scene import TinyScene, assert_same_bits, events, load_pt
from tests.test_resume import vanilla

RATE = 0.5
BIAS = "view bias"


class ViewBias(Component):
    """An offset per photograph, which takes what is too bright or too dark in all of it."""

    name = BIAS
    schema = (StateRule(BIAS, (ANY,)),)

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self.values = torch.zeros(len(names))
        self._gradient = torch.zeros(len(names))
        self._leaf: Tensor | None = None

    def before_view(self, view: TrainingView) -> TrainingView:
        row = self._rows[view.camera.name]
        self._leaf = self.values[row].clone().requires_grad_()
        return view.with_loss(AddedLoss(BIAS, (LossTerm(BIAS, 0.1, "image", self._error),)))

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        self._gradient[self._rows[result.view.camera.name]] += self._leaf.grad

    def statistics(self) -> Sequence[Tensor]:
        return (self._gradient,)

    def after_step(self, iteration: int) -> None:
        self.values -= RATE * self._gradient
        self._gradient.zero_()

    def report(self) -> ComponentReport:
        largest = float(self.values.abs().max())
        figures = (Figure("Bias/largest bias", largest),)
        return ComponentReport(figures, f"largest bias {largest:.3f}")

    def state(self) -> dict[str, Any]:
        return {BIAS: self.values.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.values = state[BIAS].clone()

    def _error(self, strip: ImageStrip) -> Tensor:
        difference = strip.color.detach() + self._leaf - strip.target_color()
        counted = difference[strip.counted_rows]
        return counted.square().sum() / (strip.height * counted.shape[1] * counted.shape[2])


@pytest.fixture
def biases(monkeypatch, scene: TinyScene) -> list[ViewBias]:
    """Components that runs were built with."""
    made: list[ViewBias] = []
    original = vanilla_run.components_of

    def add(*inputs: Any) -> list[Component]:
        made.append(ViewBias([camera.name for camera in scene.cameras]))
        return [*original(*inputs), made[-1]]

    monkeypatch.setattr(vanilla_run, "components_of", add)
    return made


def test_it_learns_reports_and_saves(scene, tmp_path, biases, capsys):
    kind = vanilla(scene, 16, 4)
    assert kind.run(tmp_path) == 0
    (bias,) = biases
    # Backgrounds are random, so every photograph differs from its render in the mean.
    assert int((bias.values != 0).sum()) > 5
    folder = tmp_path / kind.folder
    assert torch.equal(load_pt(folder / "16.pt")["resume"]["stage"][BIAS], bias.values)
    largest = float(bias.values.abs().max())
    record = json.loads((folder / "run.json").read_text())
    assert record["figures"]["largest bias"] == pytest.approx(largest)
    assert f"largest bias {largest:.3f}" in (folder / "log.txt").read_text()
    curves = events(folder)
    assert curves.Scalars("Bias/largest bias")[-1].value == pytest.approx(largest)
    assert len(curves.Scalars(f"Loss/{BIAS}")) > 0


@pytest.mark.slow
def test_it_resumes_with_the_same_bits(scene, tmp_path, biases):
    kind = vanilla(scene, 16, 4)
    assert kind.run(tmp_path / "whole") == 0
    assert kind.run(tmp_path / "parts") == 0
    folder = tmp_path / "parts" / kind.folder
    for iteration in (12, 16):
        (folder / f"{iteration}.pt").unlink()
    assert kind.run(tmp_path / "parts") == 0
    assert_same_bits(tmp_path / "whole" / kind.folder / "16.pt", folder / "16.pt")
    assert torch.equal(biases[0].values, biases[2].values)
