# SPDX-License-Identifier: Apache-2.0
"""The settings of a mesh extraction, with the defaults of SuGaR."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gaussian_splatting.images import SugarSize
from sugar_extractors.level_sets import (
    DIAMOND_EXTENT,
    MIN_OPACITY,
    N_NEIGHBORS,
    RAY_REACH,
    RAY_SAMPLES,
)
from sugar_extractors.poisson import PoissonConfig
from sugar_extractors.tsdf import TsdfConfig
from sugar_trainers.naming import OUTPUT_ROOT, number_text, scene_name
from sugar_utils.errors import UserError

EXTRACTORS = ("poisson", "tsdf")
SURFACE_LEVELS = (0.1, 0.3, 0.5)
DECIMATION_TARGETS = (200_000, 1_000_000)
SURFACE_POINTS = 10_000_000
FOREGROUND_FACTOR, BACKGROUND_FACTOR = 1.0, 4.0

Vector = tuple[float, float, float]


@dataclass(frozen=True)
class MeshOptions:
    """A mesh extraction; the defaults are those of SuGaR.

    Attributes:
        scene_path: Scene folder.
        checkpoint_path: Vanilla 3DGS checkpoint folder (or PLY) that the cameras come from.
        iteration_to_load: Iteration of that checkpoint.
        coarse_model_path: Coarse ``.pt``, or the folder of a coarse run; unused with
            ``use_vanilla``.
        use_vanilla: Mesh the vanilla Gaussians themselves.
        output_dir: Folder of the meshes; None for ``output/coarse_mesh/<scene>``.
        eval_split: Whether every 8th view is held out; held-out views give no surface points.
        images_dir: Folder of the photographs; None for the one the checkpoint was trained on.
        size: Size of the views.
        extractor: ``poisson`` or ``tsdf``.
        surface_levels: Densities of the level sets; one mesh for each. Unused by ``tsdf``.
        decimation_targets: Triangles of the foreground and of the background; one mesh for each.
        project_on_surface_points: Snap the decimated mesh to the surface points.
        surface_points: Points in total and per level.
        background: Whether to mesh what lies outside the foreground box.
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
        backend: ``auto``, ``open3d`` or ``pycolmap``.
        seed: Seed of the choice of pixels.
        overwrite: Replace meshes that were made with other settings.
        notices: Lines to print at the start.
    """

    scene_path: Path
    checkpoint_path: Path
    iteration_to_load: int = 7_000
    coarse_model_path: Path | None = None
    use_vanilla: bool = False
    output_dir: Path | None = None
    eval_split: bool = True
    images_dir: str | None = None
    size: SugarSize = field(default_factory=SugarSize)
    extractor: str = "poisson"
    surface_levels: tuple[float, ...] = SURFACE_LEVELS
    decimation_targets: tuple[int, ...] = DECIMATION_TARGETS
    project_on_surface_points: bool = True
    surface_points: int = SURFACE_POINTS
    background: bool = True
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
    backend: str = "auto"
    seed: int = 0
    overwrite: bool = False
    notices: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Folder of the meshes."""
        return self.output_dir or OUTPUT_ROOT / "coarse_mesh" / scene_name(self.scene_path)

    def mesh_path(self, level: float, target: int) -> Path:
        """File of one mesh."""
        model = "vanilla3dgs"
        if not self.use_vanilla and self.coarse_model_path is not None:
            model = model_file(self.coarse_model_path).resolve().parent.name
            model = model.removeprefix("sugarcoarse_")
        kind = "tsdf" if self.extractor == "tsdf" else f"level{number_text(level)}"
        return self.directory / f"sugarmesh_{model}_{kind}_decim{target}.ply"

    def identity(self, level: float, target: int) -> dict[str, Any]:
        """The settings that decide one mesh, as its ``.json`` file keeps them."""
        skipped = {"output_dir", "notices", "overwrite", "surface_levels", "decimation_targets"}
        skipped |= {"poisson"} if self.extractor == "tsdf" else {"tsdf"}
        values = {name: v for name, v in asdict(self).items() if name not in skipped}
        for name in ("scene_path", "checkpoint_path", "coarse_model_path"):
            values[name] = None if values[name] is None else str(Path(values[name]).resolve())
        for name in ("bboxmin", "bboxmax"):
            values[name] = None if values[name] is None else list(values[name])
        values["level"] = None if self.extractor == "tsdf" else level
        values["decimation_target"] = target
        if not self.use_vanilla and self.coarse_model_path is not None:
            stat = model_file(self.coarse_model_path).stat()
            values["coarse_model"] = [stat.st_size, stat.st_mtime_ns]
        return values


def model_file(path: Path) -> Path:
    """The ``.pt`` itself, or the last one of a run's folder."""
    if path.is_dir():
        files = [p for p in path.glob("*.pt") if p.stem.isdigit()]
        if not files:
            raise UserError(f"{path}: holds no .pt file; check --coarse_model_path")
        return max(files, key=lambda p: int(p.stem))
    if not path.is_file():
        raise UserError(f"{path}: no such file; check --coarse_model_path")
    return path
