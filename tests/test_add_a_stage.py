# SPDX-License-Identifier: Apache-2.0
"""The recipe "Add a stage" of DOCS/ARCHITECTURE.md, carried out: a stage that only learns colours.

One file of the product would be touched: the new stage's own. Folder, identity, session, memory,
checkpoints, resuming, curves and report come from the runner.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.loss_terms import COLOR, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.engine.runner import Messages, RunOptions, StageRun, run_stage
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ViewPass
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.rasterization import project
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.scenes.scene import load_scene
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from sugar_utils.recipe import Recipe
from tests.support.tiny_scene import TinyScene, assert_same_bits, disturbed_cloud, load_pt


@dataclass(frozen=True)
class ColorConfig:
    """Settings that decide the result."""

    iterations: int = 12
    white_background: bool = False
    random_seed: int = 0


@dataclass(frozen=True)
class ColorOptions:
    """A run."""

    scene: TinyScene
    folder: Path
    config: ColorConfig = field(default_factory=ColorConfig)
    compute: Compute = field(default_factory=Compute)
    run: RunOptions = field(default_factory=RunOptions)
    messages: tuple[str, ...] = ()

    def prepare(self, messages: Messages) -> tuple[StageRun[GaussianCloud], GaussianCloud]:
        scene = load_scene(self.scene.root, size_rule=SugarSize(), notify=messages)
        settings = {"iterations": self.config.iterations}
        identity = Recipe(settings, scene_inputs(scene), {"scene": self.scene.root})
        last = self.config.iterations
        loop = LoopConfig(first=1, last=last, seed=0, checkpoint_interval=4, log_interval=2)
        directory = RunDirectory(self.folder, identity)
        results: Sequence[Path] = (self.folder / f"{last}.pt",)
        build = functools.partial(lambda extent, cloud, *_: ColorStage(cloud, extent), scene.extent)
        run = StageRun("colours", scene, directory, loop, build, results)
        return run, disturbed_cloud(self.scene.cloud)


class ColorStage(Stage):
    """Colours of fixed Gaussians."""

    name = "colors"
    terms = (COLOR,)

    def __init__(self, cloud: GaussianCloud, extent: float) -> None:
        self._config = ColorConfig()
        self.extent = extent
        rates = replace(LearningRates(), position_lr_init=1e-20, position_lr_final=1e-20)
        self.model = TrainableCloud(cloud, rates, extent)
        self.memory_plan = MemoryPlan(WHOLE_IMAGE)
        self.n_views = 0

    def phase(self, iteration: int) -> str:
        return "colors"

    def begin(self, iteration: int) -> None:
        self.model.schedule_position_rate(iteration)

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        view = self.composited(view)
        projection = project(self.gaussians(), view.camera)
        view_pass = ViewPass(projection, view, resources.memory.split)
        values, _ = view_pass.backpropagate(self.terms)
        self.n_views += 1
        return ViewResult(view, report(self.terms, values), view_pass.radii)

    def extra_state(self) -> dict[str, Any]:
        return {"n_views": torch.tensor([float(self.n_views)])}

    def restore_extra(self, state: dict[str, Any]) -> None:
        self.n_views = int(state["n_views"])


def test_a_new_stage_trains_writes_and_is_not_repeated(scene, tmp_path, capsys):
    options = ColorOptions(scene, tmp_path)
    path = run_stage(options)
    out = capsys.readouterr().out
    assert "held-out PSNR" in out
    assert "colors 12/12" in out
    losses = load_pt(path)["train_losses"]
    assert losses[-1] < losses[0]
    assert (tmp_path / "report.html").is_file()
    assert run_stage(options) == path
    assert "finished already" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_stage_resumes_with_the_same_bits(scene, tmp_path):
    whole = run_stage(ColorOptions(scene, tmp_path / "whole"))
    path = run_stage(ColorOptions(scene, tmp_path / "parts"))
    for name in ("12.pt",):
        (path.parent / name).unlink()
    again = run_stage(ColorOptions(scene, tmp_path / "parts"))
    assert_same_bits(whole, again)
    assert int(load_pt(again)["resume"]["stage"]["n_views"]) == 12


def test_other_settings_are_refused_in_the_same_folder(scene, tmp_path):
    run_stage(ColorOptions(scene, tmp_path))
    with pytest.raises(UserError, match="iterations: 12 → 8"):
        run_stage(ColorOptions(scene, tmp_path, ColorConfig(iterations=8)))
