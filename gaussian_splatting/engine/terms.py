# SPDX-License-Identifier: Apache-2.0
"""The table of a stage's loss terms: what pulls at the model, how hard, when, and where it looks.

All there is to say about a term is its entry. Gradients and the weighted sum are made from the
table; the console, TensorBoard and the checks show what it reports, by its names. Each term is
differentiated as soon as it is known, so that the peak of memory is the largest term's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.graph import backpropagate_weighted
from gaussian_splatting.engine.guard import TOTAL
from gaussian_splatting.engine.masking import color_terms_of, exposed_strip, is_counted
from gaussian_splatting.engine.strips import ImageTerm, StripMaps
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, SSIM_HALO
from sugar_utils.device import constants

Place = Literal["model", "samples", "image", "half-size image"]
"""What a term looks at: the model itself, once per view; points drawn in it, chunk by chunk; the
rendered view, strip by strip; or depth and normals of the view at half its size."""


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss.

    Attributes:
        name: What logs, curves and errors call it.
        weight: Its weight in the loss.
        at: Where it looks.
        value: The unweighted scalar, from what is seen there: an :class:`ImageStrip` of an image,
            else what the stage says. Of a chunk or a strip it is the share, the sum divided by
            the number in the whole. None where a view has nothing for it.
        active: In which iterations it acts.
        maps: What it reads of the rendered view besides its colour: ``"depth"``, ``"normal"``,
            ``"plane"``.
        halo: Rows of the image on each side that the loss of a row depends on.
    """

    name: str
    weight: float
    at: Place
    value: Callable[[Any], Tensor | None]
    active: Callable[[int], bool] = lambda iteration: True
    maps: tuple[str, ...] = ()
    halo: int = 0

    def bind(
        self,
        camera: Camera,
        photograph: Tensor | None,
        exposure: Tensor | None = None,
        inside: Tensor | None = None,
        beside: Any = None,
    ) -> ImageTerm:
        """The term of one view's image; see :class:`ImageStrip`."""

        def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
            strip = ImageStrip(maps, camera, photograph, exposure, inside, beside)
            value = self.value(strip)
            return value, {self.name: value}

        return ImageTerm(self.halo, evaluate, self.weight)


@dataclass(frozen=True)
class ImageStrip:
    """What a term sees of a strip of the image.

    Attributes:
        maps: What was rendered.
        camera: The view, at the size of the whole maps.
        photograph: Photograph of the view. (H, W, 3) bytes or floats, or (H, W, 4) bytes with a
            mask of what to ignore. At half its size only what the mask says, None without one.
        exposure: Its exposure; None where it has none. See :func:`exposed`. (2, 3)
        inside: Pixels of the whole image that say what the exposure is; None for all. (H, W) bool
        beside: What else the stage knows of the view.
    """

    maps: StripMaps
    camera: Camera
    photograph: Tensor | None
    exposure: Tensor | None = None
    inside: Tensor | None = None
    beside: Any = None

    @property
    def image(self) -> Tensor:
        """The strip as a photograph of this exposure shows it. (R, W, 3)"""
        return exposed_strip(self.maps, self.exposure, self.inside)

    @property
    def counted(self) -> Tensor | None:
        """Pixels of the whole image that count. (H, W) bool; None for all"""
        return None if self.photograph is None else is_counted(self.photograph)


def acting(terms: Iterable[LossTerm], iteration: int) -> dict[Place, list[LossTerm]]:
    """The terms that act in an iteration, by where they look."""
    active = [term for term in terms if term.active(iteration)]
    return {place: [term for term in active if term.at == place] for place in get_args(Place)}


def backpropagate(terms: Iterable[LossTerm], seen: Any) -> dict[str, Tensor]:
    """Backpropagate one term after the other from what all of them see; return their values."""
    found = {}
    for term in terms:
        value = term.value(seen)
        if value is not None:
            backpropagate_weighted([value], [term.weight])
            found[term.name] = value.detach()
        # Its graph would live on beside that of the next term.
        del value
    return found


def report(terms: Sequence[LossTerm], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weighted sum of what was found and the unweighted values, in the order of the table."""
    shown = [term for term in terms if term.name in found]
    values = torch.stack([found[term.name] for term in shown])
    weights = constants(tuple(term.weight for term in shown), values.device)
    return {TOTAL: (values * weights).sum(), **{term.name: found[term.name] for term in shown}}


def _color(strip: ImageStrip) -> Tensor:
    return color_terms_of(strip.image, strip.maps, strip.photograph, DSSIM_WEIGHT)[0]


COLOR = LossTerm("color", 1.0, "image", _color, halo=SSIM_HALO)
"""The colour loss of 3DGS against the photograph."""
