# SPDX-License-Identifier: Apache-2.0
"""Settings of SuGaR's stages, with the values of the papers as defaults."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from gaussian_splatting.components.densification import DensificationConfig
from gaussian_splatting.components.exposures import NO_LATER_EXPOSURE, LaterExposure
from gaussian_splatting.core.cloud import MAX_SH_DEGREE
from gaussian_splatting.core.milestones import scaled
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    OptimizerConfig,
    stage_identity,
)
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.shared_flags import (
    max_gaussians,
    random_seed,
    schedule_scale,
    white_background,
)
from sugar_scene.geometry import SampleRule
from sugar_scene.mesh_bound import LAYOUTS
from sugar_utils import flags
from sugar_utils.flags import AUTO, Automatic
from sugar_utils.settings import flag, made_of, without_flags

Regularization = Literal["density", "sdf", "dn_consistency"]
REGULARIZATIONS: tuple[Regularization, ...] = ("sdf", "density", "dn_consistency")  # those of SuGaR
MULTIVIEW = "multiview"
MODES = (*REGULARIZATIONS, MULTIVIEW)

MOST_SAMPLES = 1_000_000
SAMPLES_EACH = 4
"""Points for each Gaussian with ``--sdf_samples auto``. They add as much variance to gradients as
the choice of the view does; 16 and 33 give the same surface."""

LEAST_INTERVALS = {"densification_interval": 50, "trim_interval": 200}
"""However short a schedule is: Gaussians need so long between two rounds of densification, and a
trim costs as much as an epoch."""

MAX_RATE_FACTOR = 3.0
"""However short a schedule is, rates are at most so many times those of the paper."""

SHORT_SCALE = 0.1
"""Scale of the schedule up to which half of it gave as good views: at 0.3 they lose 0.3 dB."""

Corner = tuple[float, float, float]
AnySchedule = TypeVar("AnySchedule", bound="Schedule")

_coarse = partial(flag, group="coarse stage")
_weight = partial(flag, group="single coarse stage", parse=flags.non_negative_float)
_multiview = partial(flag, group="multi-view mode", no_effect_when="unless -r multiview")
_refine = partial(flag, group="refinement stage")
_alone = partial(flag, group="only train_refined.py")
_corner = partial(_alone, None, parse=flags.vector3, metavar="(X,Y,Z)")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Milestones in absolute iterations (SuGaR, section 5.1).

    The count goes on where the paper's vanilla stage ends, whatever checkpoint is loaded.
    """

    first: int = 7_000
    last: int = 15_000  # inclusive
    log_interval: int = 200
    schedule_scale: float = schedule_scale()  # of all others; rates follow the paper's clock

    @classmethod
    def from_flags(cls: type[AnySchedule], schedule_scale: float = 1.0) -> AnySchedule:
        """Build from values of flags."""
        return cls().scaled(schedule_scale)

    def scaled(self: AnySchedule, scale: float) -> AnySchedule:
        """The same schedule with all milestones and intervals scaled."""
        # Milestones are the whole numbers.
        milestones = {n: scaled(v, scale) for n, v in asdict(self).items() if type(v) is int}
        for name, least in LEAST_INTERVALS.items():
            if name in milestones:
                milestones[name] = max(milestones[name], min(getattr(self, name), least))
        return replace(self, **milestones, schedule_scale=self.schedule_scale * scale)


@dataclass(frozen=True, kw_only=True)
class SugarConfig:
    """Settings that all stages of SuGaR have."""

    rates: LearningRates = without_flags(LearningRates)
    white_background: bool = white_background()
    exposure: LaterExposure = NO_LATER_EXPOSURE
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    records: bool = True  # whether there is memory for recorded passes
    random_seed: int = random_seed()

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but cannot act."""
        return ()

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return stage_identity(self)


@dataclass(frozen=True)
class CoarseSchedule(Schedule):
    """When opacities are made binary, and when the geometry is regularised."""

    entropy_start: int = 7_000  # exclusive
    entropy_stop: int = 9_000  # exclusive
    prune: int = 9_000  # after it, faint Gaussians are removed
    regularize: int = 9_000  # after it, the geometric terms act
    neighbor_interval: int = 500

    def entropy_active(self, iteration: int) -> bool:
        """Whether the entropy term acts."""
        return self.entropy_start < iteration < self.entropy_stop

    def regularization_active(self, iteration: int) -> bool:
        """Whether the geometric terms act."""
        return iteration > self.regularize


@dataclass(frozen=True)
class CoarseConfig(SugarConfig):
    """Everything that decides the result of a coarse stage but for its inputs."""

    regularization_type: Regularization = "dn_consistency"
    schedule: CoarseSchedule = field(default_factory=CoarseSchedule)
    estimation_factor: float = _weight(
        0.2, "weight of the density or sdf term; part of the folder's name", short="-e"
    )
    normal_factor: float = _weight(
        0.2, "weight of the better-normal term; part of the folder's name", short="-n"
    )
    entropy_factor: float = 0.1
    dn_factor: float = 0.05  # weight of depth-normal consistency
    n_neighbors: int = 16  # of the density field, the Gaussian itself included
    sdf_samples: Automatic = _coarse(
        MOST_SAMPLES,
        "points drawn per iteration for the surface terms of all modes; auto: 4 for "
        "each Gaussian that may be drawn, at most 1000000; unset: 1000000, auto with --preset fast",
        parse=flags.positive_or_auto,
        metavar="{N,auto}",
        modes={"fast": AUTO},
    )
    sample_chunk: int = 1_000_000  # points evaluated at once; does not change the result
    knn_batch_size: int | None = _coarse(
        None,
        "points per launch of the neighbour search; the result does not depend on it; unset: "
        "100000 on a CPU, all of them on a GPU",
        parse=flags.positive_int,
    )
    prune_opacity: float = 0.5  # less opaque Gaussians are removed when geometric terms begin
    full_res_normals: bool = _coarse(
        True,
        "depth-normal consistency at the training size, in the colour's own raster pass; "
        "False: in a pass of its own at half the size, which needs less memory and time",
        no_effect_when="unless -r dn_consistency",
    )

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but cannot act."""
        if self.full_res_normals or self.uses_depth_normals:
            return ()
        mode = self.regularization_type
        return (f"--full_res_normals has no effect with {mode}, which renders no normals",)

    @property
    def named_weights(self) -> tuple[float, float]:
        """Weights that are part of the folder's name."""
        return self.estimation_factor, self.normal_factor

    @property
    def uses_sdf(self) -> bool:
        """Whether the sdf term takes the place of the density term."""
        return self.regularization_type == "sdf"

    @property
    def uses_depth_normals(self) -> bool:
        """Whether normals of the depth map are compared with rendered ones."""
        return self.regularization_type == "dn_consistency"

    @property
    def density_factor(self) -> float:
        """Factor of the density field; its reciprocal K keeps the sdf field below 1."""
        return 1.0 / 16.0 if self.uses_sdf else 1.0

    @property
    def sample_rule(self) -> SampleRule:
        """Rule for the number of points that are drawn."""
        if self.sdf_samples == AUTO:
            return SampleRule(SAMPLES_EACH, MOST_SAMPLES)
        return SampleRule(self.sdf_samples, self.sdf_samples)

    def samples_for(self, n_candidates: int) -> int:
        """Points to draw where so many Gaussians may be drawn."""
        return self.sample_rule.number(n_candidates)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return stage_identity(self, "sample_chunk", "knn_batch_size")


@dataclass(frozen=True)
class MultiviewSchedule(Schedule):
    """When the mode densifies and trims."""

    last: int = 20_000
    densify_until: int = 15_000  # exclusive
    densification_interval: int = 100
    trim_interval: int = 1_000  # of what too few views see
    short_multiview: bool | Literal["auto"] = _multiview(
        False,
        "half the iterations, at learning rates that grow by the square root of how much "
        "shorter than the paper's the schedule is, at most threefold; auto: with --schedule_scale "
        "of 0.1 or less; unset: off, auto with --preset fast",
        parse=flags.boolean_or_auto,
        modes={"fast": flags.AUTO},
    )

    @classmethod
    def from_flags(
        cls, schedule_scale: float = 1.0, short_multiview: bool | Literal["auto"] = False
    ) -> MultiviewSchedule:
        """Build from values of flags; a short schedule begins where the full one does."""
        full = cls().scaled(schedule_scale)
        if short_multiview == flags.AUTO:
            short_multiview = schedule_scale <= SHORT_SCALE
        if not short_multiview:
            return full
        half = full.scaled(0.5)
        shift = full.first - half.first
        return replace(
            half,
            first=full.first,
            last=half.last + shift,
            densify_until=half.densify_until + shift,
            schedule_scale=full.schedule_scale,
            short_multiview=True,
        )

    @property
    def rate_factor(self) -> float:
        """Factor of all rates, so that fewer steps lead as far: a sum of steps, which are mostly
        noise, grows with the root of their number.
        """
        if not self.short_multiview:
            return 1.0
        length = 0.5 * self.schedule_scale
        return min(MAX_RATE_FACTOR, length**-0.5)

    def paper_iteration(self, iteration: int) -> float:
        """Where the paper's schedule is, which the rate of positions follows."""
        passed = iteration - self.first if self.short_multiview else 0
        return (iteration + passed) / self.schedule_scale

    def densifies(self, iteration: int) -> bool:
        """Whether Gaussians grow in number."""
        return iteration < self.densify_until

    def densification_due(self, iteration: int) -> bool:
        """Whether a round of densification follows an iteration."""
        passed = iteration - self.first
        on_interval = passed > 0 and passed % self.densification_interval == 0
        return on_interval and self.densifies(iteration)

    def trim_due(self, iteration: int) -> bool:
        """Whether Gaussians that too few views see are removed before an iteration."""
        passed = iteration - self.first
        return passed > 0 and passed % self.trim_interval == 0


@dataclass(frozen=True)
class DensificationLimit:
    """The one flag of densification that the mode has."""

    max_gaussians: int | None = max_gaussians()

    @classmethod
    def from_flags(cls, max_gaussians: int | None = None) -> DensificationConfig:
        """Settings of densification with the values of the mode."""
        return DensificationConfig(prune_opacity=0.05, max_gaussians=max_gaussians)


@dataclass(frozen=True)
class MultiviewConfig(SugarConfig):
    """Everything that decides the result of the multi-view mode but for its inputs."""

    regularization_type: ClassVar[str] = MULTIVIEW
    named_weights: ClassVar[tuple[float, ...]] = ()  # weights that are part of the folder's name

    schedule: MultiviewSchedule = field(default_factory=MultiviewSchedule)
    densification: DensificationConfig = made_of(DensificationLimit, DensificationLimit.from_flags)
    plane_normal_factor: float = 0.05  # weight of planes' normals and those of their depth
    photometric_factor: float = 0.6  # weight of 1 - NCC of patches in a view and its neighbour
    geometric_factor: float = 0.02  # weight of the cycle reprojection error
    flatten_factor: float = 10.0  # weight of the smallest scales, in camera extents
    multiview_pixels: int = _multiview(
        16_384,
        "pixels of a view that are compared with a neighbour, per iteration",
        parse=flags.positive_int,
    )
    cutoff_deviations: float = _multiview(
        2.5,
        "standard deviations at which Gaussians end, in this model wherever it is rendered; "
        "0: where their opacity falls below 1/255, as in 3DGS",
        parse=flags.non_negative_float,
    )
    min_views: int = 2  # Gaussians that fewer training views see are dropped
    exposure: LaterExposure = LaterExposure(exposure_compensation=True)

    @property
    def view_factors(self) -> tuple[float, float]:
        """Photometric and geometric."""
        return self.photometric_factor, self.geometric_factor

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        return {"regularization_type": self.regularization_type, **super().identity()}


@dataclass(frozen=True)
class RefineConfig(SugarConfig):
    """Everything that decides the result of the refinement.

    The box only sets the rate of the vertices; without one the extent of the cameras does.
    """

    refinement_iterations: int = _refine(
        15_000, "length of the refinement", short="-f", parse=flags.positive_int
    )
    gaussians_per_triangle: int = _refine(
        1, "Gaussians bound to each triangle", short="-g", choices=tuple(LAYOUTS)
    )
    normal_consistency_factor: float = _alone(
        0.1,
        "weight of the normal consistency of the mesh",
        short="-n",
        parse=flags.non_negative_float,
    )
    n_vertices_in_fg: int = _alone(
        1_000_000,
        "nominal number of foreground vertices; sets the learning rate of vertices only",
        short="-v",
        parse=flags.positive_int,
    )
    bboxmin: Corner | None = _corner(
        "low corner of the foreground; sets the learning rate of vertices only", short="-b"
    )
    bboxmax: Corner | None = _corner(
        "high corner of the foreground; sets the learning rate of vertices only", short="-B"
    )
    refine_surface_terms: bool = _refine(
        False,
        "keep the surface that the coarse stage found: neighbouring views are compared, and "
        "without a background pixels that the mesh does not cover have no gradient; unset: on with "
        "-r multiview, else off, as in the original",
        parse=flags.boolean,
        modes={"multiview": True},
    )
    keep_background: bool | None = _refine(
        False,
        "keep the Gaussians that blend into pixels which the mesh does not cover, such as "
        "the sky, beside those on the mesh; auto: True, False with --preset reference; unset: auto",
        parse=flags.automatic_boolean,
        metavar="{auto,True,False}",
        modes={"fast": True},
    )
    antialiased: bool = _refine(
        False,
        "shrink the opacity of splats below a pixel as the rasterizer widens them, so that "
        "surfaces do not move inwards; kept in .pt and in all files of Gaussians but .splat; "
        "unset: off, on with --preset fast",
        parse=flags.boolean,
        modes={"fast": True},
    )
    initial_colors: str = _refine(
        "mesh",
        "colours that the Gaussians on the mesh start with: mesh, those of its vertices; "
        "photographs, those of the views that show them, from the start with all bands; unset: "
        "mesh, photographs with --preset fast",
        choices=("mesh", "photographs"),
        modes={"fast": "photographs"},
    )
    initial_shapes: str = _refine(
        "circles",
        "shapes that the Gaussians on the mesh start with: circles, as large as the shortest edge "
        "of their triangle allows; triangles, ellipses that cover their triangle; unset: circles, "
        "triangles with --preset fast",
        choices=("circles", "triangles"),
        modes={"fast": "triangles"},
    )
    sh_interval: int = 1_000  # iterations until the degree grows by one
    log_interval: int = 200
    schedule_scale: float = schedule_scale()  # of lengths; rates follow the paper's clock

    def __post_init__(self) -> None:
        flags.require_box(self.bboxmin, self.bboxmax)

    @classmethod
    def from_flags(cls, schedule_scale: float = 1.0, **flags: Any) -> RefineConfig:
        """Build from values of flags."""
        return cls(**flags).with_schedule(schedule_scale)

    def with_schedule(self, scale: float) -> RefineConfig:
        """The same settings with every length and interval scaled."""
        names = ("refinement_iterations", "sh_interval", "log_interval")
        lengths = {name: scaled(getattr(self, name), scale) for name in names}
        exposure = self.exposure.with_schedule(scale)
        total = self.schedule_scale * scale
        return replace(self, exposure=exposure, schedule_scale=total, **lengths)

    def vertex_rate_scale(self, extent: float) -> float:
        """Spatial scale of the vertex rate: ten times the scene's radius over the root of the
        number of vertices, about the distance between neighbouring vertices. World units
        """
        radius = extent
        if self.bboxmin is not None and self.bboxmax is not None:
            radius = 0.5 * math.dist(self.bboxmin, self.bboxmax)
        # The original takes this root in float32; so do we, to start from the same rates.
        return 10.0 * radius / float(np.sqrt(np.float32(self.n_vertices_in_fg)))

    def sh_degree(self, iteration: int) -> int:
        """Degree of the colours in an iteration."""
        if self.initial_colors == "photographs":
            return MAX_SH_DEGREE
        return min(MAX_SH_DEGREE, (iteration - 1) // self.sh_interval)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        box = None if self.bboxmin is None else (self.bboxmin, self.bboxmax)
        return {**stage_identity(self, "bboxmin", "bboxmax"), "bbox": box}
