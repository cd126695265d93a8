# SPDX-License-Identifier: Apache-2.0
"""Loss terms: one entry of a table says all there is to say about a term.

Gradients, weighted sum, console, TensorBoard and checks are made from the table of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gaussian_splatting.engine.gradients import backpropagate_weighted
from gaussian_splatting.engine.guard import TOTAL
from gaussian_splatting.engine.training_views import (
    ImageStrip,
    color_gradient_of,
    color_loss,
)
from gaussian_splatting.losses.color_loss import ColorLoss
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, SSIM_HALO
from sugar_utils.device import constants

Place = Literal["model", "samples", "image", "half-size image"]
"""Input of a term: the model itself, once per view; points drawn in it, chunk by chunk; the
rendered view, strip by strip; or depth and normals of the view at half its size."""


class StripValue(NamedTuple):
    """Value of a term on one strip, and the figures that are reported of it."""

    loss: Tensor  # unweighted scalar to backpropagate
    figures: Mapping[str, Tensor]  # scalars by name; those of all strips are added up


@dataclass(frozen=True)
class LossTerm:
    """A loss term: its weight, when it acts, where it looks, and its value there."""

    name: str
    weight: float
    at: Place
    # The unweighted scalar, from what the stage gives terms of this place: an :class:`ImageStrip`
    # of an image. Of a chunk or a strip it is the share, the sum divided by the number in the
    # whole. None where a view has nothing for it.
    value: Callable[[Any], Tensor | None]
    active: Callable[[int], bool] = lambda iteration: True
    # What it reads of the rendered view besides its colour: ``"depth"``, ``"normal"``, ``"plane"``.
    maps: tuple[str, ...] = ()
    halo: int = 0  # rows that it reads above and below a strip
    is_reported: bool = True  # whether its value is a figure of the run, and part of the sum

    def evaluate(self, strip: ImageStrip) -> StripValue:
        """Evaluate an image term on a strip."""
        loss = self.value(strip)
        if loss is None:
            raise ValueError(f"loss term {self.name}: an image term has a value in every view")
        return StripValue(loss, {self.name: loss} if self.is_reported else {})

    def backpropagate(self, strip: ImageStrip) -> dict[str, Tensor]:
        """Add the gradients of an image term to the maps of a strip; return its figures."""
        loss, figures = self.evaluate(strip)
        backpropagate_weighted([loss], [self.weight])
        return {name: figure.detach() for name, figure in figures.items()}

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Names of its unweighted figures in the report of a view."""
        return (self.name,)


@dataclass(frozen=True)
class ColorTerm(LossTerm):
    """The colour loss of 3DGS against the photograph."""

    dssim_weight: float = field(kw_only=True)
    reports_parts: bool = field(kw_only=True)  # report L1 and SSIM instead of their sum

    def evaluate(self, strip: ImageStrip) -> StripValue:
        """Evaluate the loss on a strip."""
        loss = color_loss(strip, self.dssim_weight)
        return StripValue(loss.total, self._figures(loss))

    def backpropagate(self, strip: ImageStrip) -> dict[str, Tensor]:
        """Add the gradient to the colours of a strip; without autograd where it has no part."""
        comparison = None
        # With another weight, the product would have to be rounded as autograd rounds it.
        if self.weight == 1.0:
            comparison = color_gradient_of(strip, self.dssim_weight)
        if comparison is None:
            return super().backpropagate(strip)
        colors = strip.color
        earlier = colors.grad
        colors.grad = comparison.gradient if earlier is None else earlier + comparison.gradient
        return self._figures(comparison.loss)

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Names of the reported values: L1 and SSIM, whose sum is the loss, or the loss alone."""
        return ("l1", "ssim") if self.reports_parts else (self.name,)

    def _figures(self, loss: ColorLoss) -> dict[str, Tensor]:
        parts = {"l1": loss.l1, "ssim": loss.ssim} if self.reports_parts else {}
        return {self.name: loss.total, **parts}


def color_term(dssim_weight: float, *, reports_parts: bool = True) -> ColorTerm:
    """Return the colour loss of 3DGS against the photograph."""
    value = partial(_color_value, dssim_weight=dssim_weight)
    return ColorTerm(
        "color",
        1.0,
        "image",
        value,
        halo=SSIM_HALO,
        dssim_weight=dssim_weight,
        reports_parts=reports_parts,
    )


def _color_value(strip: ImageStrip, dssim_weight: float) -> Tensor:
    return color_loss(strip, dssim_weight).total


COLOR: LossTerm = color_term(DSSIM_WEIGHT, reports_parts=False)
"""The colour loss of the SuGaR stages."""


def acting(terms: Iterable[LossTerm], iteration: int) -> dict[Place, list[LossTerm]]:
    """Sort the terms that act in an iteration by where they look."""
    active_terms: dict[Place, list[LossTerm]] = {place: [] for place in get_args(Place)}
    for term in terms:
        if term.active(iteration):
            active_terms[term.at].append(term)
    return active_terms


def backpropagate(terms: Iterable[LossTerm], inputs: object) -> dict[str, Tensor]:
    """Backpropagate one term after the other from the same inputs; return their values by name."""
    values = {}
    for term in terms:
        value = term.value(inputs)
        if value is not None:
            backpropagate_weighted([value], [term.weight])
            values[term.name] = value.detach()
        # Its graph would live on beside that of the next term.
        del value
    return values


def report(terms: Sequence[LossTerm], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Figures of a view: the weighted sum, then the unweighted values in the order of the table.

    Args:
        values: Value of each term by its name, and every figure of ``figure_names``.
    """
    present = [term for term in terms if term.name in values]
    if len(present) == 1 and present[0].weight == 1.0:
        figures = {TOTAL: values[present[0].name]}
    else:
        stacked = torch.stack([values[term.name] for term in present])
        weights = constants(tuple(term.weight for term in present), stacked.device)
        figures = {TOTAL: (stacked * weights).sum()}
    for term in present:
        for name in term.figure_names:
            figures[name] = values[name]
    return figures
