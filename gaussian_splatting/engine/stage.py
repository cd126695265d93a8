# SPDX-License-Identifier: Apache-2.0
"""What a training stage is: what is optimised, and the table of its loss terms.

All there is to say about a term is its entry: gradients, weighted sum, console, TensorBoard and
checks are made from it. Each term is differentiated as soon as it is known, which saves memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from gaussian_splatting import rasterization
from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.depth_maps import NOTHING_KNOWN, KnownDepths
from gaussian_splatting.engine.guard import TOTAL
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.poses import PoseRefinement
from gaussian_splatting.engine.strips import ImageTerm, StripMaps, backpropagate_weighted
from gaussian_splatting.engine.training_views import Target, color_terms_of, target_of
from gaussian_splatting.losses.photometric import DSSIM_WEIGHT, SSIM_HALO
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedIntersections,
)
from sugar_utils.device import constants

MAX_DEGREE = 3

Place = Literal["model", "samples", "image", "half-size image"]
"""What a term looks at: the model itself, once per view; points drawn in it, chunk by chunk; the
rendered view, strip by strip; or depth and normals of the view at half its size."""
SOLID_ALPHA = 0.5  # opacity from which a pixel has a depth
DEPTH_NOISE = 0.1  # relative error up to which depth counts by its square
DEPTH_SHARE = 0.1
"""Share of the weight of depth maps that is left at the end of the vanilla stage, and later."""


@dataclass(frozen=True)
class StepResult:
    # Detached scalars: each active term unweighted, their weighted sum as ``"loss"``.
    terms: dict[str, Tensor]
    radii: Tensor  # screen radii, 0 for Gaussians the view did not see, (N,) int32
    guess: PredictedIntersections | None = None
    # What else the view changes; called when its numbers were found to be good.
    commit: Callable[[], None] = lambda: None


class StageConfig(Protocol):
    white_background: bool
    random_seed: int


class Stage(ABC):
    """One optimisation, step by step.

    What is not abstract serves a stage without densification that renders its model as it is and
    learns exposures if there are any.
    """

    name: str
    _config: StageConfig
    _rasterizer: rasterization.Rasterizer = rasterization.WARP
    model: TrainableModel
    extent: float  # camera extent in world units
    memory_plan: MemoryPlan
    # Poses that are learned beside the model; None where they are taken as they are.
    poses: PoseRefinement | None = None
    exposures: Exposures | None = None
    depths: KnownDepths = NOTHING_KNOWN
    pairs: IntersectionPrediction | None = None

    @abstractmethod
    def phase(self, iteration: int) -> str:
        """Name of the part of the schedule an iteration belongs to; memory is reported by it."""

    @abstractmethod
    def begin(self, iteration: int) -> None:
        """Change what has to change before rendering: rates, population, neighbours.

        Whatever adds, removes or resets Gaussians belongs here and not into :meth:`apply`: after
        a step the loop measures, exports and saves the model, which has to be the one that was
        trained.
        """

    def view_scale(self, iteration: int) -> float:
        """Size of the images of an iteration, as a share of the full width and height."""
        return 1.0

    @abstractmethod
    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        """Evaluate all loss terms of one view and add their gradients to the parameters.

        When memory runs out in it, or a guess in it was wrong, gradients are dropped and it is
        called again; so it changes nothing else, but leaves that to ``StepResult.commit``.

        Args:
            target: Its photograph. (H, W, 3) uint8, or float32 in [0, 1]
        """

    def collect_exposure(self, photograph: str, leaf: Tensor | None) -> None:
        """Add the gradient of a photograph's exposure; part of ``StepResult.commit``."""
        if self.exposures is not None:
            self.exposures.collect(photograph, leaf)

    def step_statistics(self) -> Sequence[Tensor]:
        """Sums over the views of this step besides gradients; processes add them up in place."""
        return () if self.exposures is None else self.exposures.step_statistics()

    def apply(self, iteration: int) -> None:
        """Make the optimiser step."""
        self.model.optimizer.step()
        if self.exposures is not None:
            self.exposures.step(iteration)

    def gaussians(self) -> Gaussians:
        return self.model.cloud.activate()

    def depth_feature(self, gaussians: Gaussians, camera: Camera) -> Tensor | None:
        """The feature that :func:`depth_term` reads; None where no depth is known. (N, 1)"""
        return inverse_depths(gaussians, camera) if self.depths.maps else None

    def rendered_degree(self) -> int:
        return MAX_DEGREE

    def background(self, iteration: int, view_index: int) -> Tensor:
        """Colour behind the Gaussians of a view in training. (3,)"""
        return rasterization.plain_background(self._config.white_background, self.model.device)

    def target(self, photograph: Tensor, camera: Camera, iteration: int, view_index: int) -> Target:
        """What the loss terms of a view are given besides the rendered image."""
        exposures = self.exposures
        plain = self.background(iteration, view_index)
        exposure = None if exposures is None else exposures.leaf(camera.name, iteration)
        draws = {"seed": self._config.random_seed, "iteration": iteration, "view_index": view_index}
        return target_of(photograph, plain, camera, exposure, **draws)

    def render(self, camera: Camera, *, geometry: bool) -> rasterization.RenderOutput:
        """Render for evaluation, without gradients; ``geometry`` asks for depth and normals."""
        return rasterization.render_view(
            self.gaussians(),
            camera,
            white=self._config.white_background,
            geometry=geometry,
            sh_degree=self.rendered_degree(),
            rasterizer=self._rasterizer,
        )

    def fitted_pose(self, camera: Camera, photograph: Tensor) -> Camera:
        """A held-out camera, moved to where its photograph fits best where poses are learned."""
        return camera

    def view_metrics(self, camera: Camera, output: rasterization.RenderOutput) -> dict[str, float]:
        """Further figures of an evaluated view, rendered with geometry.

        The median relative error of depth, where a depth map says what it is.
        """
        known = self.depths.of(camera, output.depth.device)
        if known is None:
            return {}
        solid = (output.alpha > SOLID_ALPHA) & (known > 0)
        errors = (output.depth / output.alpha / known - 1).abs()[solid]
        return {"depth_error": float(errors.median())} if len(errors) else {}

    def view_maps(self, camera: Camera) -> dict[str, Tensor]:
        """Further pictures of an evaluated view by name, (H, W, 3) uint8 on the CPU."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """What resuming needs beyond parameters and moments; tensors and primitives."""
        return {} if self.exposures is None else self.exposures.state()

    def restore_extra(self, state: dict[str, Any]) -> None:
        """Take :meth:`extra_state` back; parameters and moments are restored already."""
        if self.exposures is not None:
            self.exposures.restore(state)

    def export(self, iteration: int) -> None:  # noqa: B027
        """Write what other programs read, at the iterations the loop was told to export."""


@dataclass(frozen=True)
class LossTerm:
    name: str
    weight: float
    at: Place
    # The unweighted scalar, from what is seen there: an :class:`ImageStrip` of an image, else what
    # the stage says. Of a chunk or a strip it is the share, the sum divided by the number in the
    # whole. None where a view has nothing for it.
    value: Callable[[Any], Tensor | None]
    active: Callable[[int], bool] = lambda iteration: True
    # What it reads of the rendered view besides its colour: ``"depth"``, ``"normal"``, ``"plane"``.
    maps: tuple[str, ...] = ()
    halo: int = 0

    def bind(self, camera: Camera, target: Target, beside: Any = None) -> ImageTerm:
        def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
            value = self.value(ImageStrip(maps, camera, target, beside))
            return value, {self.name: value}

        return ImageTerm(self.halo, evaluate, self.weight)


@dataclass(frozen=True)
class ImageStrip:
    """What a term sees of a strip of the image."""

    maps: StripMaps
    camera: Camera
    target: Target
    beside: Any = None

    @property
    def image(self) -> Tensor:
        """The strip as a photograph of this exposure shows it. (R, W, 3)"""
        return self.target.exposed(self.maps)

    @property
    def counted(self) -> Tensor | None:
        """Pixels of the whole image that count. (H, W) bool; None for all"""
        return self.target.counted


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
    return color_terms_of(strip.image, strip.maps, strip.target.photograph, DSSIM_WEIGHT)[0]


def inverse_depths(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Reciprocals of the depths of Gaussians, the first feature that a depth term reads. (N, 1)

    Blended reciprocals are bounded where something far away shines through, blended depths are not.
    """
    rotation = camera.rotation[2].tolist()
    offset = float(camera.translation[2])
    x, y, z = gaussians.means.unbind(dim=1)
    depth = x * rotation[0] + y * rotation[1] + z * rotation[2] + offset
    return 1 / depth.clamp_min(camera.near)[:, None]


def depth_term(known: KnownDepths, weight: float) -> LossTerm:
    """Mean relative error of reciprocal depth where a depth map says what it is.

    The first feature of the view is :func:`inverse_depths`.
    """

    def value(strip: ImageStrip) -> Tensor:
        maps = strip.maps
        found = maps.features[maps.counted][..., 0]
        depth = known.of(strip.camera, found.device)
        if depth is None:
            return found.sum() * 0
        if strip.counted is not None:
            depth = depth * strip.counted
        here = depth[maps.shown.start : maps.shown.stop][maps.counted]
        errors = found * here - (here > 0).to(found.dtype)
        # Quadratic where sensors are no better, or their noise would drive Gaussians apart.
        errors = huber_loss(errors, torch.zeros_like(errors), reduction="sum", delta=DEPTH_NOISE)
        return errors / (DEPTH_NOISE * (depth > 0).sum().clamp_min(1))

    return LossTerm("depth", weight, "image", value)


def later_depth_terms(known: KnownDepths) -> tuple[LossTerm, ...]:
    """The term of depth maps in stages after the vanilla one; none without depth maps."""
    return (depth_term(known, DEPTH_SHARE * known.weight),) if known.maps else ()


COLOR = LossTerm("color", 1.0, "image", _color, halo=SSIM_HALO)
"""The colour loss of 3DGS against the photograph."""
