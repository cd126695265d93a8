# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs: a gain and an offset per colour channel, and their optimisation.

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

from gaussian_splatting.optim.schedule import scaled
from sugar_utils.flags import AUTO, boolean_or_auto
from sugar_utils.settings import flag

AnyExposure = TypeVar("AnyExposure", bound="ExposureConfig")
MIN_NOISE = 0.1  # stops; standard deviation from which exposures of neighbouring views differ
MAX_RATE = 0.05  # of the shortest runs, which show each photograph some ten times
# names in checkpoints: per photograph, for all
KEY = "exposure of "
STEPS = "exposure steps"

BETAS = (0.9, 0.99)  # the second is short: a photograph is seen some hundred times
_EPSILON = 1e-15
MIN_VARIANCE = 1e-6  # of a channel; below, there is no gain to be fitted, only an offset


@dataclass(frozen=True)
class ExposureConfig:
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
        """The same settings, on or off; ``differ`` tells what is left to be found out."""
        asked = self.exposure_compensation
        return replace(self, exposure_compensation=differ if asked == AUTO else asked)

    def identity(self) -> dict[str, Any]:
        """What decides a result; empty where nothing is compensated."""
        return {"exposure": asdict(self)} if self.exposure_compensation else {}


@dataclass(frozen=True)
class LaterExposure(ExposureConfig):
    """Of stages that begin with a trained model, and mostly with its exposures."""

    start: int = 0
    rate: float = 1e-3

    def with_schedule(self, scale: float) -> LaterExposure:
        """The same settings: what was learned needs no larger steps in a short run."""
        return self


NO_EXPOSURE = ExposureConfig()
NO_LATER_EXPOSURE = LaterExposure()


class Exposures:
    """Adam on (2, 3) values per photograph: logarithms of gains, then offsets, per channel.

    Mean gain and mean offset are kept at no change: the model's colours are those of the mean
    photograph. Those that ``initial``, of an earlier stage, does not have begin with no change.
    """

    def __init__(
        self,
        config: ExposureConfig,
        names: Sequence[str],
        device: torch.device,
        span: tuple[int, int],
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._config = config
        self._start = max(config.start, span[0])
        self._last = span[1]
        self._rows = {name: row for row, name in enumerate(names)}
        self.values = torch.zeros(len(self._rows), 2, 3, device=device)
        self._adam = VisitedAdam(self.values.shape, self.values.dtype, device)
        for name in self._rows.keys() & (initial or {}).keys():
            self.values[self._rows[name]] = initial[name].to(device)
        if initial:
            self._anchor()

    def leaf(self, name: str, iteration: int) -> Tensor | None:
        """A copy of a photograph's exposure that collects its gradient; None before the start."""
        if iteration <= self._config.start or name not in self._rows:
            return None
        return self.values[self._rows[name]].clone().requires_grad_(True)

    def collect(self, name: str, leaf: Tensor | None) -> None:
        if leaf is not None and leaf.grad is not None:
            self._adam.gradient[self._rows[name]] += leaf.grad

    def step_statistics(self) -> tuple[Tensor, ...]:
        """The step's gradient, to be summed over the processes."""
        return (self._adam.gradient,)

    def step(self, iteration: int) -> None:
        """Step the photographs that the step showed; before the start nothing changes."""
        if iteration <= self._config.start:
            return
        config = self._config
        rate = rate_at(config.rate, config.final_share, self._start, self._last, iteration)
        self.values -= rate * self._adam.direction()
        self._anchor()

    def by_name(self) -> dict[str, Tensor]:
        """Exposure of each photograph, on the CPU. (2, 3) each"""
        values = self.values.cpu()
        return {name: values[row] for name, row in self._rows.items()}

    def range(self) -> tuple[float, float]:
        """Least and largest gain of any photograph and channel, each in stops."""
        stops = self.values[:, 0] / torch.log(self.values.new_tensor(2.0))
        return float(stops.min()), float(stops.max())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: values and both moments by photograph, and steps made."""
        adam = self._adam
        together = torch.stack([self.values, adam.first, adam.second]).cpu()
        entries = {f"{KEY}{name}": together[:, row] for name, row in self._rows.items()}
        return {**entries, STEPS: adam.steps.cpu().clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take :meth:`state` back; photographs that it does not know stay as they are."""
        adam = self._adam
        device = self.values.device
        for name, row in self._rows.items():
            saved = state.get(f"{KEY}{name}")
            if saved is not None:
                self.values[row], adam.first[row], adam.second[row] = saved.to(device)
        if STEPS in state and state[STEPS].shape == adam.steps.shape:
            adam.steps = state[STEPS].to(device, copy=True)

    def _anchor(self) -> None:
        """Bring the mean gain to 1 and the mean offset to 0, per channel."""
        self.values -= mean_exposure(self.values)


def mean_exposure(values: Tensor) -> Tensor:
    """The exposure with the mean gain and the mean offset of some, per channel. (V, 2, 3) -> (2, 3)

    The mean of photographs is that of a model in this exposure; with the mean logarithm of gains
    the model would be darker where they differ much.
    """
    wide = values.double()
    log_gain = wide[:, 0].exp().mean(dim=0).log()
    return torch.stack([log_gain, wide[:, 1].mean(dim=0)]).to(values.dtype)


def saved_exposures(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Exposures by name of photograph in what :meth:`Exposures.state` returned. (2, 3) each"""
    return {name[len(KEY) :]: t[0] for name, t in state.items() if name.startswith(KEY)}


def rate_at(rate: float, final_share: float, start: int, last: int, iteration: int) -> float:
    """Learning rate of an iteration: log-linear to ``final_share`` of ``rate`` at ``last``."""
    progress = (iteration - start) / max(1, last - start)
    return rate * final_share ** min(max(progress, 0.0), 1.0)


class VisitedAdam:
    """Moments and counts of V rows of any shape (V, ...), and the gradient of the step to come."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.first = zeros(*shape)
        self.second = zeros(*shape)
        self.steps = zeros(shape[0])
        self.gradient = zeros(*shape)

    def direction(self) -> Tensor:
        """Take the gradient: what to subtract of the rows, per unit of learning rate. (V, ...)"""
        wide = (-1,) + (1,) * (self.gradient.dim() - 1)
        seen = self.gradient.flatten(1).abs().sum(dim=1) > 0
        self.steps += seen
        n = self.steps.clamp_min(1).view(wide)
        seen = seen.view(wide)
        first = self.first.lerp(self.gradient, 1 - BETAS[0])
        second = self.second.lerp(self.gradient.square(), 1 - BETAS[1])
        self.first = torch.where(seen, first, self.first)
        self.second = torch.where(seen, second, self.second)
        self.gradient.zero_()
        unbiased = (second / (1 - BETAS[1] ** n)).sqrt() + _EPSILON
        return torch.where(seen, first / (1 - BETAS[0] ** n) / unbiased, 0.0)


class _Exposed(torch.autograd.Function):
    """Image and (2, 3) log gains and offsets -> image; sums within rows come first."""

    @staticmethod
    def forward(ctx, image: Tensor, exposure: Tensor) -> Tensor:
        gain = exposure[0].exp()
        ctx.save_for_backward(image, gain)
        return torch.addcmul(exposure[1], image, gain)

    @staticmethod
    def backward(ctx, d_exposed: Tensor):
        image, gain = ctx.saved_tensors
        d_log_gain = gain * _sum_of_pixels(d_exposed * image)
        d_exposure = torch.stack([d_log_gain, _sum_of_pixels(d_exposed)])
        return d_exposed * gain, d_exposure


def exposed(image: Tensor, exposure: Tensor | None, inside: Tensor | None = None) -> Tensor:
    """The image, (H, W, 3), as a photograph of this exposure, (2, 3), shows it: exp(a) I + b.

    Args:
        inside: Pixels that say what the exposure is; None for all. What lies behind a masked
            object is made up and must not. (H, W) bool
    """
    if exposure is None:
        return image
    if inside is None:
        return _Exposed.apply(image, exposure)
    fixed = _Exposed.apply(image, exposure.detach())
    return torch.where(inside[..., None], _Exposed.apply(image, exposure), fixed)


def unexposed(image: Tensor, exposure: Tensor) -> Tensor:
    """The inverse of :func:`exposed`, within 0 to 1: colours of the model. (H, W, 3), (2, 3)"""
    return ((image - exposure[1]) / exposure[0].exp()).clamp(0, 1)


def fit_gain_and_offset(image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Gains and offsets, (3,) float64 each, that bring one (H, W, 3) image closest to another."""
    mean_x = _mean_of_pixels(image)
    mean_y = _mean_of_pixels(target)
    x = image.double() - mean_x
    y = target.double() - mean_y
    variance = _mean_of_pixels(x * x)
    covariance = _mean_of_pixels(x * y)
    flat = variance < MIN_VARIANCE
    gain = torch.where(flat, 1.0, covariance / variance.clamp_min(MIN_VARIANCE))
    return gain, mean_y - gain * mean_x


def _mean_of_pixels(image: Tensor) -> Tensor:
    return _sum_of_pixels(image) / (image.shape[0] * image.shape[1])


def _sum_of_pixels(image: Tensor) -> Tensor:
    """Sums per channel; those of rows are added up in float64. (H, W, 3) -> (3,)"""
    return image.sum(dim=1).sum(dim=0, dtype=torch.float64).to(image.dtype)
