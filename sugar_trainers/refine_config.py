# SPDX-License-Identifier: Apache-2.0
"""Settings of the refinement stage, with the values of the paper as defaults."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates, scaled
from sugar_scene.mesh_bound import triangle_layout

MAX_SH_DEGREE = 3
Corner = tuple[float, float, float]


@dataclass(frozen=True)
class RefineConfig:
    """Everything that decides the result of the refinement.

    Attributes:
        iterations: Optimisation runs from iteration 1 to this one.
        per_triangle: Gaussians per triangle: 1, 3, 4 or 6.
        normal_consistency_factor: Weight of the normal consistency of the mesh.
        n_vertices_in_fg: Nominal number of foreground vertices; only sets the vertex rate.
        bbox: Opposite corners of the foreground box; only sets the vertex rate. None: the extent
            of the cameras takes its place.
        rates: Learning rates; the position rate is that of the vertices.
        sh_interval: Iterations after which the spherical-harmonics degree grows by one.
        schedule_scale: What the schedule was multiplied with; rates follow the paper's clock.
        white_background: Render on white instead of black.
        optimizer: Storage of parameters and moments, and which Gaussians step.
        split: How the memory of one view is saved; no part of the identity.
        seed: Random seed.
    """

    iterations: int = 15_000
    per_triangle: int = 1
    normal_consistency_factor: float = 0.1
    n_vertices_in_fg: int = 1_000_000
    bbox: tuple[Corner, Corner] | None = None
    rates: LearningRates = field(default_factory=LearningRates)
    sh_interval: int = 1_000
    log_interval: int = 200
    schedule_scale: float = 1.0
    white_background: bool = False
    optimizer: OptimizerConfig = DEFAULT_OPTIMIZER
    split: ImageSplit = WHOLE_IMAGE
    seed: int = 0

    def __post_init__(self) -> None:
        triangle_layout(self.per_triangle)

    def with_schedule(self, scale: float) -> RefineConfig:
        """The same settings with every length and interval scaled."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__}
        for name in ("iterations", "sh_interval", "log_interval"):
            values[name] = scaled(values[name], scale)
        return RefineConfig(**{**values, "schedule_scale": self.schedule_scale * scale})

    def vertex_rate_scale(self, extent: float) -> float:
        """Spatial scale of the vertex rate: ten times the scene's radius over the root of the
        number of vertices, about the distance between neighbouring vertices. World units

        Args:
            extent: Camera extent in world units, the radius where no box is given.
        """
        radius = extent if self.bbox is None else 0.5 * math.dist(*self.bbox)
        # The original takes this root in float32; so do we, to start from the same rates.
        return 10.0 * radius / float(np.sqrt(np.float32(self.n_vertices_in_fg)))

    def sh_degree(self, iteration: int) -> int:
        """Degree of the colours in an iteration."""
        return min(MAX_SH_DEGREE, (iteration - 1) // self.sh_interval)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON values."""
        values = asdict(self)
        values.pop("optimizer")
        values.pop("split")
        return {**values, **self.optimizer.identity()}
