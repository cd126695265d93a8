# SPDX-License-Identifier: Apache-2.0
"""The settings of a mesh extraction, with the defaults of SuGaR."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sugar_extractors.mesh.ablations import RESOLUTION
from sugar_extractors.mesh.level_sets import (
    DIAMOND_EXTENT,
    MIN_OPACITY,
    N_NEIGHBORS,
    RAY_REACH,
    RAY_SAMPLES,
)
from sugar_extractors.mesh.poisson import PoissonConfig
from sugar_extractors.mesh.surface_samples import CANDIDATES_PER_POINT
from sugar_extractors.mesh.tsdf import TsdfConfig
from sugar_trainers.capture import CaptureOptions, model_file
from sugar_trainers.naming import OUTPUT_ROOT, number_text, scene_name

MeshVariant = Literal["", "tsdf", "poissoncenters", "marchingcubes"]
"""How a mesh was made, as file names tell it; empty for level sets and Poisson."""

COARSE_FLAG, OUTPUT_FLAG = "--coarse_model_path", "--mesh_output_dir"
EXTRACTORS = ("poisson", "tsdf")
_VARIANTS: dict[str, MeshVariant] = {
    "poisson": "",
    "tsdf": "tsdf",
    "centers": "poissoncenters",
    "marching_cubes": "marchingcubes",
}
SURFACE_LEVELS = (0.1, 0.3, 0.5)
DECIMATION_TARGETS = (200_000, 1_000_000)
SURFACE_POINTS = 10_000_000
MIN_BACKGROUND_SHARE = 0.001
FOREGROUND_FACTOR, BACKGROUND_FACTOR = 1.0, 4.0

Vector = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class MeshOptions(CaptureOptions):
    """A mesh extraction; the defaults are those of SuGaR.

    Held-out views give no surface points. Of the vanilla checkpoint only the cameras are used,
    unless it is meshed itself.

    Attributes:
        coarse_model_path: Coarse ``.pt``, or the folder of a coarse run; unused with
            ``use_vanilla``.
        use_vanilla: Mesh the vanilla Gaussians themselves.
        output_dir: Folder of the meshes; None for ``output/coarse_mesh/<scene>``.
        extractor: ``poisson``, ``tsdf``, or the ablations ``centers`` and ``marching_cubes``.
        surface_levels: Densities of the level sets; one mesh for each. Unused by ``tsdf``
            and ``centers``.
        decimation_targets: Triangles of the foreground and of the background; one mesh for each.
        project_on_surface_points: Snap the decimated mesh to the surface points.
        surface_points: Points in total and per level.
        candidates_per_point: Pixels tried per point.
        density_factor: Factor of the density, before it is compared with the level.
        background: Whether to mesh what lies outside the foreground box.
        min_background_share: Share of the surface points below which the background is left out.
        bboxmin: Low corner of the foreground box, world units; None for a cube.
        bboxmax: High corner, likewise.
        center_bbox: Whether the box is relative to the mean camera centre. None: the default cube
            is, a box given by its corners is not.
        foreground_factor: Half side of the default cube in camera extents.
        background_factor: Half side of the background cube in camera extents.
        min_opacity: Gaussians of at most this opacity are ignored.
        n_neighbors: Gaussians that the density is summed over.
        diamond_extent: Half diagonals of the diamonds in standard deviations.
        ray_samples: Densities per ray.
        ray_reach: Standard deviations searched before and behind a hit.
        poisson: Constants of the reconstruction.
        tsdf: Constants of the fusion.
        grid_resolution: Corners along the side of the grid of ``marching_cubes``.
        backend: ``auto``, ``open3d`` or ``pycolmap``.
        seed: Seed of the choice of pixels.
        overwrite: Replace meshes that were made with other settings.
    """

    coarse_model_path: Path | None = None
    use_vanilla: bool = False
    output_dir: Path | None = None
    extractor: str = "poisson"
    surface_levels: tuple[float, ...] = SURFACE_LEVELS
    decimation_targets: tuple[int, ...] = DECIMATION_TARGETS
    project_on_surface_points: bool = True
    surface_points: int = SURFACE_POINTS
    candidates_per_point: int = CANDIDATES_PER_POINT
    density_factor: float = 1.0
    background: bool = True
    min_background_share: float = MIN_BACKGROUND_SHARE
    bboxmin: Vector | None = None
    bboxmax: Vector | None = None
    center_bbox: bool | None = None
    foreground_factor: float = FOREGROUND_FACTOR
    background_factor: float = BACKGROUND_FACTOR
    min_opacity: float = MIN_OPACITY
    n_neighbors: int = N_NEIGHBORS
    diamond_extent: float = DIAMOND_EXTENT
    ray_samples: int = RAY_SAMPLES
    ray_reach: float = RAY_REACH
    poisson: PoissonConfig = field(default_factory=PoissonConfig)
    tsdf: TsdfConfig = field(default_factory=TsdfConfig)
    grid_resolution: int = RESOLUTION
    backend: str = "auto"
    seed: int = 0
    overwrite: bool = False

    @property
    def directory(self) -> Path:
        """Folder of the meshes."""
        return self.output_dir or OUTPUT_ROOT / "coarse_mesh" / scene_name(self.scene_path)

    def mesh_path(self, level: float, target: int) -> Path:
        """File of one mesh."""
        model = "vanilla3dgs"
        if not self.use_vanilla and self.coarse_model_path is not None:
            path = self.coarse_model_path
            folder = path if path.is_dir() else path.resolve().parent
            model = folder.resolve().name.removeprefix("sugarcoarse_")
        return self.directory / mesh_name(model, level, target, self.variant)

    @property
    def variant(self) -> MeshVariant:
        """How file names tell the extractor."""
        return _VARIANTS[self.extractor]

    @property
    def has_levels(self) -> bool:
        """Whether the surface is a level set of the density."""
        return self.extractor in ("poisson", "marching_cubes")

    @property
    def jobs(self) -> list[tuple[float, int]]:
        """Level and target of every mesh: levels in the outer, targets in the inner loop."""
        levels = self.surface_levels if self.has_levels else (0.0,)
        return [(level, target) for level in levels for target in self.decimation_targets]

    @property
    def mesh_paths(self) -> list[Path]:
        """The meshes, in the order of the jobs."""
        return [self.mesh_path(*job) for job in self.jobs]

    def identity(self, level: float, target: int) -> dict[str, Any]:
        """The settings that decide one mesh, as its ``.json`` file keeps them."""
        skipped = {
            "scene_path",
            "checkpoint_path",
            "coarse_model_path",
            "output_dir",
            "compute",
            "overwrite",
            "surface_levels",
            "decimation_targets",
        }
        skipped |= {"tsdf"} if self.extractor != "tsdf" else {"poisson"}
        skipped |= {"grid_resolution"} if self.extractor != "marching_cubes" else {"poisson"}
        values = {name: v for name, v in asdict(self).items() if name not in skipped}
        values["level"] = level if self.has_levels else None
        values["decimation_target"] = target
        return values

    @property
    def model(self) -> Path | None:
        """The coarse ``.pt``; None where the vanilla Gaussians are meshed.

        Raises:
            UserError: There is none.
        """
        if self.use_vanilla or self.coarse_model_path is None:
            return None
        return model_file(self.coarse_model_path, COARSE_FLAG)

    def sources(self) -> dict[str, Any]:
        """Where the inputs lie."""
        own = {} if self.model is None else {"coarse_model": self.model.resolve()}
        return {**super().sources(), **own}


def mesh_name(model: str, level: float, target: int, variant: MeshVariant = "") -> str:
    """File name of a coarse mesh.

    Args:
        model: Name of the coarse run's folder without ``sugarcoarse_``, or ``vanilla3dgs``.
        level: Density of the surface; not part of the name where the variant has none.
        target: Triangles of the foreground and of the background.
        variant: How the mesh was made.
    """
    kind = {
        "": f"_level{number_text(level)}",
        "tsdf": "_tsdf",
        "poissoncenters": "_poissoncenters",
        # Without an underscore, as in the original.
        "marchingcubes": f"marchingcubes_level{number_text(level)}",
    }[variant]
    return f"sugarmesh_{model}{kind}_decim{target}.ply"
