# SPDX-License-Identifier: Apache-2.0
"""A refinement run from coarse mesh to refined ``.pt`` and PLY."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.engine.identity import Identity, scene_inputs
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.runner import Notices, RunOptions, StageRun, run_stage
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.shared_flags import Preset, checkpoint_interval, preset
from sugar_scene.mesh.triangle_mesh import read_mesh_ply
from sugar_scene.mesh_bound import BoundCloud, bind_to_mesh
from sugar_scene.multiview.neighbor_views import NeighborViews
from sugar_trainers.capture import CaptureOptions, capture_exposures, load_capture
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.naming import OUTPUT_ROOT, refined_name, scene_name
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_memory import plan_strips
from sugar_trainers.view_comparison import ViewComparer
from sugar_utils.console import Console
from sugar_utils.files import file_digest
from sugar_utils.settings import flag

TEST_INTERVAL = 5_000
_alone = partial(flag, group="only train_refined.py")


@dataclass(frozen=True, kw_only=True)
class RefineOptions(CaptureOptions):
    """A refinement run; of the checkpoint only cameras and exposures are used.

    Attributes:
        ply_dir: Folder of the refined PLY; None for ``output_dir``, or without that
            ``output/refined_ply/<scene>``.
        config: What decides the optimisation.
        memory: How much memory there is.
        run: Treatment of an occupied folder.
        notices: Lines to print at the start.
    """

    mesh_path: Path = _alone(
        MISSING, "coarse mesh (PLY with vertex colours); needed", short="-m", parse=Path,
        missing="pass the coarse mesh that extract_mesh.py made",
    )  # fmt: skip
    output_dir: Path | None = _alone(
        None, "parent of the run's folder; unset: output/refined/<scene>", short="-o", parse=Path
    )
    ply_dir: Path | None = None
    config: RefineConfig = field(default_factory=RefineConfig)
    checkpoint_interval: int = checkpoint_interval("only train_refined.py")
    preset: Preset = preset("only train_refined.py")
    export_ply: bool = flag(True, "write the refined Gaussians as PLY", group="refinement stage")
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)
    notices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name that all files of the refined model share."""
        return refined_name(
            self.mesh_path,
            self.config.normal_consistency_factor,
            self.config.gaussians_per_triangle,
        )

    @property
    def directory(self) -> Path:
        """The run's folder."""
        parent = self.output_dir or OUTPUT_ROOT / "refined" / scene_name(self.scene_path)
        return parent / self.name

    @property
    def result(self) -> Path:
        """The final ``.pt``."""
        return self.directory / f"{self.config.refinement_iterations}.pt"

    @property
    def ply_path(self) -> Path:
        """The refined Gaussians for other programs."""
        folder = self.ply_dir or self.output_dir
        if folder is None:
            folder = OUTPUT_ROOT / "refined_ply" / scene_name(self.scene_path)
        return folder / f"{self.name}.ply"

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result."""
        return {**self.capture_identity(), **self.config.identity()}

    def sources(self) -> dict[str, Any]:
        """Where the inputs lie."""
        return {**super().sources(), "mesh": self.mesh_path.resolve()}


def train_refined(options: RefineOptions, images: ImageStore | None = None) -> Path:
    """Refine a coarse mesh.

    Args:
        options: What to do.
        images: Decoded photographs that other stages use, too; an own store if None.

    Returns:
        The final ``.pt``. A finished run with the same settings is not repeated.

    Raises:
        UserError: For anything the user can fix.
    """
    return run_stage(_prepared, options, images)


def _prepared(options: RefineOptions, notices: Notices) -> tuple[StageRun[BoundCloud], BoundCloud]:
    config = options.config
    checkpoint, scene = load_capture(options, config.white_background, config.random_seed, notices)
    cloud = _start(options, scene.extent, notices)
    compute = options.compute
    span = 1, config.refinement_iterations
    exposures, known = capture_exposures(
        checkpoint, scene, config.exposure, span, compute.device, notices
    )
    read = scene_inputs(scene, tracks=config.refine_surface_terms)
    inputs = {**read, "mesh": file_digest(options.mesh_path), **known}
    identity = Identity(options.identity(), inputs, options.sources())

    def build(cloud: BoundCloud, store: ImageStore, console: Console) -> RefineStage:
        def export(refined: BoundCloud) -> None:
            write_refined_ply(options.ply_path, refined)
            console.info(f"refined Gaussians: {options.ply_path}")

        planned = plan_strips(cloud, config, options.memory, scene, store, console)
        exports = export if options.export_ply else None
        comparer = None
        if config.refine_surface_terms:
            neighbors = NeighborViews(
                scene.train_cameras, scene.extent, observations=scene.observations
            )
            pixels = MultiviewConfig().multiview_pixels
            comparer = ViewComparer(
                neighbors, store, scene.extent, pixels, config.random_seed, compute.rasterizer
            )
        return RefineStage(
            cloud, planned, scene.extent, exports, compute.rasterizer, exposures, comparer
        )

    results = (options.result, *([options.ply_path] if options.export_ply else []))
    directory = RunDirectory(options.directory, identity)
    return StageRun("refinement", scene, directory, _loop(options), build, results), cloud


def write_refined_ply(path: Path, cloud: BoundCloud) -> None:
    """Write mesh-bound Gaussians as a free 3DGS cloud that any viewer reads.

    Raises:
        UserError: The file cannot be written.
    """
    write_gaussian_ply(path, cloud.freed())


def _start(options: RefineOptions, extent: float, notices: Notices) -> BoundCloud:
    mesh, device = read_mesh_ply(options.mesh_path), options.compute.device
    notices(f"{mesh.n_vertices:,} vertices and {mesh.n_faces:,} triangles of {options.mesh_path}")
    return bind_to_mesh(
        torch.tensor(mesh.vertices, dtype=torch.float32, device=device),
        torch.tensor(mesh.faces, device=device),
        torch.tensor(mesh.colors, device=device).float() / 255.0,
        options.config.gaussians_per_triangle,
        extent,
    )


def _loop(options: RefineOptions) -> LoopConfig:
    config = options.config
    test_interval = scaled(TEST_INTERVAL, config.schedule_scale)
    return LoopConfig(
        first=1,
        last=config.refinement_iterations,
        seed=config.random_seed,
        log_interval=config.log_interval,
        checkpoint_interval=scaled(options.checkpoint_interval, config.schedule_scale),
        keep_checkpoints=options.run.keep_checkpoints,
        test_iterations=tuple(range(test_interval, config.refinement_iterations, test_interval)),
    )
