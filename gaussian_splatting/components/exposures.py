# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs as a component: a gain and an offset per colour channel, learned.

A camera that chooses exposure and white balance for every photograph shows one surface in many
colours. With I' = exp(a) I + b the differences belong to the photographs and not to the model.
Adam counts the steps of each photograph by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.engine.component import (
    Component,
    ComponentReport,
    ExportTarget,
    Figure,
    ViewResult,
    kept_if,
)
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.state_schema import StateRule
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.losses.exposure import mean_exposure
from gaussian_splatting.optim.visited_adam import VisitedAdam, rate_at
from gaussian_splatting.scenes.reference_layout import EXPOSURE_FILE, write_exposures
from sugar_utils.flags import AUTO, boolean_or_auto
from sugar_utils.settings import flag

AnyExposure = TypeVar("AnyExposure", bound="ExposureConfig")
MIN_NOISE = 0.1  # stops; standard deviation from which exposures of neighbouring views differ
MAX_RATE = 0.05  # of the shortest runs, which show each photograph some ten times
# names in checkpoints: per photograph, for all
KEY = "exposure of "
STEPS = "exposure steps"


@dataclass(frozen=True)
class ExposureConfig:
    """Whether exposures are learned, and how fast."""

    exposure_compensation: bool | Literal["auto"] = flag(
        False,
        "learn a gain and an offset per colour channel for each training photograph, for "
        "cameras that change exposure or white balance between photographs; auto: where exposures "
        "of neighbouring views differ by 0.1 stops, or the checkpoint has some; unset: auto with "
        "--preset fast, on with -r multiview, else off",
        group="exposure",
        parse=boolean_or_auto,
        nargs="?",
        const=True,
        task="result",
        modes={"fast": AUTO, "multiview": True},
    )
    # Without estimates from the points that photographs observe, the model first becomes one that
    # a photograph can be compared with.
    start: int = 1_000
    rate: float = 0.01
    # Share of it that is left at the end; it falls log-linearly. At a steady rate exposures
    # tremble, which cost half a decibel where there was nothing to compensate.
    final_share: float = 0.01

    def with_schedule(self, scale: float) -> ExposureConfig:
        """The same settings with a scaled start; a shorter schedule takes larger steps."""
        rate = min(max(self.rate / scale, self.rate), MAX_RATE)
        return replace(self, start=scaled(self.start, scale), rate=rate)

    def resolved(self: AnyExposure, differ: bool) -> AnyExposure:
        """Return the settings with ``auto`` resolved: on if exposures ``differ``."""
        if self.exposure_compensation != AUTO:
            return self
        return replace(self, exposure_compensation=differ)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a result; empty where nothing is compensated."""
        return {"exposure": asdict(self)} if self.exposure_compensation else {}


@dataclass(frozen=True)
class LaterExposure(ExposureConfig):
    """Of stages that begin with a trained model, and mostly with its exposures."""

    start: int = 0
    rate: float = 1e-3

    def with_schedule(self, scale: float) -> LaterExposure:
        """Return the settings unchanged: exposures of an earlier stage need no larger steps."""
        return self


NO_EXPOSURE = ExposureConfig()
NO_LATER_EXPOSURE = LaterExposure()


class Exposures(Component):
    """Adam on (2, 3) values per photograph: logarithms of gains, then offsets, per channel.

    Mean gain and mean offset are kept at no change: the model's colours are those of the mean
    photograph.

    Args:
        span: First and last iteration of the stage; the rate falls until the last.
        initial: Exposures of an earlier stage; photographs that it lacks begin with no change.
        steps_last: Whether the last iteration makes a step, as it does but for the vanilla stage.
    """

    name = "exposures"
    obeys_step_mask = True
    schema = (StateRule(KEY, (3, 2, 3)),)
    changes_exposure = True

    def __init__(
        self,
        config: ExposureConfig,
        names: Sequence[str],
        device: torch.device,
        span: tuple[int, int],
        initial: Mapping[str, Tensor] | None = None,
        *,
        steps_last: bool = True,
    ) -> None:
        self._config = config
        self._steps_last = steps_last
        self._waits_until = config.start
        self._first = span[0]
        self._last = span[1]
        self._rows = {name: row for row, name in enumerate(names)}
        self.values = torch.zeros(len(self._rows), 2, 3, device=device)
        self._adam = VisitedAdam(self.values.shape, self.values.dtype, device)
        self._step_mask: Tensor | None = None  # of the last view
        if initial:
            self._take(initial)

    def begin_with(self, estimates: Mapping[str, Tensor]) -> None:
        """Begin with estimates by the name of the photograph, (2, 3) each, and without waiting."""
        if estimates:
            self._waits_until = 0
            self._take(estimates)

    def before_view(self, view: TrainingView) -> TrainingView:
        """Give the view a leaf with the exposure of its photograph."""
        return replace(view, exposure=self.leaf(view.camera.name, view.iteration))

    def leaf(self, name: str, iteration: int) -> Tensor | None:
        """A copy of a photograph's exposure that collects its gradient; None before the start."""
        if iteration <= self._waits_until or name not in self._rows:
            return None
        return self.values[self._rows[name]].clone().requires_grad_(True)

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Add the gradient of the photograph's exposure."""
        self._step_mask = result.step_mask
        self.collect(result.view.camera.name, result.view.exposure)

    def collect(self, name: str, leaf: Tensor | None) -> None:
        """Add the gradient of a leaf of :meth:`leaf`."""
        if leaf is not None and leaf.grad is not None:
            self._adam.gradient[self._rows[name]] += kept_if(self._step_mask, leaf.grad)

    def statistics(self) -> tuple[Tensor, ...]:
        """The step's gradient, to be summed over the processes."""
        return (self._adam.gradient,)

    def after_step(self, iteration: int) -> None:
        """Step the photographs that the step showed; before the start nothing changes."""
        if iteration <= self._waits_until:
            return
        if iteration == self._last and not self._steps_last:
            return
        config = self._config
        start = max(self._waits_until, self._first)
        rate = rate_at(config.rate, config.final_share, start, self._last, iteration)
        before = self.values
        self.values = before - rate * self._adam.direction()
        self._anchor()
        self.values = kept_if(self._step_mask, self.values, before)

    def by_name(self) -> dict[str, Tensor]:
        """Exposure of each photograph, on the CPU. (2, 3) each"""
        values = self.values.cpu()
        return {name: values[row] for name, row in self._rows.items()}

    def range(self) -> tuple[float, float]:
        """Least and largest gain of any photograph and channel, each in stops."""
        stops = self.values[:, 0] / torch.log(self.values.new_tensor(2.0))
        return float(stops.min()), float(stops.max())

    def report(self) -> ComponentReport:
        """Least and largest gain of any training photograph."""
        least, largest = self.range()
        figures = (
            Figure("Exposure/least gain in stops", least),
            Figure("Exposure/largest gain in stops", largest),
        )
        line = f"gains of the training photographs: {least:+.2f} to {largest:+.2f} stops"
        return ComponentReport(figures, line)

    def export(self, target: ExportTarget) -> None:
        """Write the exposures beside the model."""
        write_exposures(target.folder / EXPOSURE_FILE, self.by_name())

    def state(self) -> dict[str, Tensor]:
        """Values and both moments by photograph, (3, 2, 3) each, and steps made."""
        adam = self._adam
        together = torch.stack([self.values, adam.first, adam.second]).cpu()
        entries = {f"{KEY}{name}": together[:, row] for name, row in self._rows.items()}
        return {**entries, STEPS: adam.steps.cpu().clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`; images that it lacks keep their exposures."""
        adam = self._adam
        device = self.values.device
        for name, row in self._rows.items():
            saved = state.get(f"{KEY}{name}")
            if saved is not None:
                value, first, second = saved.to(device)
                self.values[row] = value
                adam.first[row] = first
                adam.second[row] = second
        if STEPS in state and state[STEPS].shape == adam.steps.shape:
            adam.steps = state[STEPS].to(device, copy=True)

    def _take(self, exposures: Mapping[str, Tensor]) -> None:
        for name in self._rows.keys() & exposures.keys():
            self.values[self._rows[name]] = exposures[name].to(self.values.device)
        self._anchor()

    def _anchor(self) -> None:
        """Bring the mean gain to 1 and the mean offset to 0, per channel."""
        self.values -= mean_exposure(self.values)


def saved_exposures(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Exposures by name of photograph in what :meth:`Exposures.state` returned. (2, 3) each"""
    return {name[len(KEY) :]: t[0] for name, t in state.items() if name.startswith(KEY)}
