# SPDX-License-Identifier: Apache-2.0
"""Settings of the refinement stage, with the values of the paper as defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.learned_exposure import NO_LATER_EXPOSURE, LaterExposure
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    OptimizerConfig,
    stage_identity,
)
from gaussian_splatting.optim.schedule import LearningRates, scaled
from gaussian_splatting.shared_flags import random_seed, schedule_scale, white_background
from sugar_scene.mesh_bound import LAYOUTS, triangle_layout
from sugar_utils.flags import boolean, non_negative_float, positive_int, require_box, vector3
from sugar_utils.settings import flag, without_flags

MAX_SH_DEGREE = 3
Corner = tuple[float, float, float]
_refine = partial(flag, group="refinement stage")
_alone = partial(flag, group="only train_refined.py")


@dataclass(frozen=True)
class RefineConfig:
    """Everything that decides the result of the refinement.

    The box only sets the rate of the vertices; without one the extent of the cameras does.
    """

    refinement_iterations: int = _refine(
        15_000, "length of the refinement", short="-f", parse=positive_int
    )
    gaussians_per_triangle: int = _refine(
        1, "Gaussians bound to each triangle", short="-g", choices=tuple(LAYOUTS)
    )
    normal_consistency_factor: float = _alone(
        0.1, "weight of the normal consistency of the mesh", short="-n", parse=non_negative_float
    )
    n_vertices_in_fg: int = _alone(
        1_000_000, "nominal number of foreground vertices; sets the learning rate of vertices only",
        short="-v", parse=positive_int,
    )  # fmt: skip
    bboxmin: Corner | None = _alone(
        None, "low corner of the foreground; sets the learning rate of vertices only", short="-b",
        parse=vector3, metavar="(X,Y,Z)",
    )  # fmt: skip
    bboxmax: Corner | None = _alone(
        None, "high corner of the foreground; sets the learning rate of vertices only", short="-B",
        parse=vector3, metavar="(X,Y,Z)",
    )  # fmt: skip
    refine_surface_terms: bool = _refine(
        False, "keep the surface that the coarse stage found: neighbouring views are compared, and "
        "pixels that the mesh does not cover have no gradient; unset: on with -r multiview, else "
        "off, as in the original", parse=boolean, modes={"multiview": True},
    )  # fmt: skip
    rates: LearningRates = without_flags(LearningRates)  # the position rate is that of the vertices
    sh_interval: int = 1_000  # iterations until the degree grows by one
    log_interval: int = 200
    schedule_scale: float = schedule_scale()  # of lengths; learning rates follow the paper's clock
    white_background: bool = white_background()
    exposure: LaterExposure = NO_LATER_EXPOSURE
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    random_seed: int = random_seed()

    def __post_init__(self) -> None:
        triangle_layout(self.gaussians_per_triangle)
        require_box(self.bboxmin, self.bboxmax)

    @classmethod
    def from_flags(cls, schedule_scale: float = 1.0, **flags: Any) -> RefineConfig:
        """The settings with their schedule scaled."""
        return cls(**flags).with_schedule(schedule_scale)

    def with_schedule(self, scale: float) -> RefineConfig:
        """The same settings with every length and interval scaled."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__}
        for name in ("refinement_iterations", "sh_interval", "log_interval"):
            values[name] = scaled(values[name], scale)
        values["exposure"] = self.exposure.with_schedule(scale)
        return RefineConfig(**{**values, "schedule_scale": self.schedule_scale * scale})

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
        return min(MAX_SH_DEGREE, (iteration - 1) // self.sh_interval)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        box = None if self.bboxmin is None else (self.bboxmin, self.bboxmax)
        return {**stage_identity(self, "bboxmin", "bboxmax"), "bbox": box}
