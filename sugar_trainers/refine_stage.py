# SPDX-License-Identifier: Apache-2.0
"""The refinement stage: mesh and bound Gaussians optimised together (section 4.3), and its run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.compute import BackendFlags
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryOptions, MemoryPlan
from gaussian_splatting.engine.run_directory import Identity, RunDirectory, scene_inputs
from gaussian_splatting.engine.runner import Messages, RunOptions, StageRun
from gaussian_splatting.engine.stage import (
    COLOR,
    LossTerm,
    Stage,
    StepResult,
    acting,
    backpropagate,
    report,
)
from gaussian_splatting.engine.strips import ViewPass
from gaussian_splatting.engine.training_views import without_uncovered
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.optim.optimizer_config import optimizer_config
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.rasterization import WARP, Rasterizer, project
from gaussian_splatting.shared_flags import Preset, ScheduleFlags, checkpoint_interval, preset
from sugar_scene.mesh_bound import BoundCloud, Placement, TrainableBoundCloud, bind_to_mesh
from sugar_scene.mesh_normals import PairsOfTriangles, adjacent_face_pairs
from sugar_scene.reprojection import NeighborViews
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_trainers.capture import CaptureOptions, capture_exposures, load_capture
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.naming import OUTPUT_ROOT, refined_name, scene_name
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.stage_memory import plan_strips
from sugar_trainers.terms import comparing_terms
from sugar_trainers.view_comparison import ViewComparer
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import flag, from_args, parser_of


class RefineStage(Stage):
    """Colour loss and normal consistency on mesh-bound Gaussians."""

    name = "refine"

    def __init__(
        self,
        cloud: BoundCloud,
        config: RefineConfig,
        extent: float,
        export: Callable[[BoundCloud], None] | None = None,
        rasterizer: Rasterizer = WARP,
        exposures: Exposures | None = None,
        comparer: ViewComparer | None = None,
    ) -> None:
        self.extent = extent
        self.exposures = exposures
        scale = config.vertex_rate_scale(extent)
        self.model = TrainableBoundCloud(
            cloud, config.rates, scale, config.optimizer, config.random_seed
        )
        self.memory_plan = MemoryPlan(config.split)
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        self._comparer = comparer
        # The topology never changes, so what follows from it is found once.
        self._placement = Placement(cloud)
        self._pairs = PairsOfTriangles(adjacent_face_pairs(cloud.faces), len(cloud.vertices))
        self.terms = refine_terms(config, self._pairs)
        self._iteration = 0

    def phase(self, iteration: int) -> str:
        """One phase only."""
        return "refine"

    def begin(self, iteration: int) -> None:
        """Learning rate and colour degree."""
        self._iteration = iteration
        self.model.schedule_vertex_rate(iteration / self._config.schedule_scale)

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        """Backpropagate the terms of the image, then those of the mesh."""
        on = acting(self.terms, iteration)
        beside, reach = None, None
        if self._comparer is not None:
            if camera.mask is None or camera.mask.mode != "object":
                # Outside of an object there is nothing, and that is known everywhere.
                target = without_uncovered(target, self._covered(camera))
            with torch.no_grad():
                gaussians = self.gaussians()
            split, reach = self.memory_plan.split, self._comparer.reach
            beside = self._comparer.surface_view(
                gaussians, camera, target, split, iteration, view_index
            )
        seen = self.target(target, camera, iteration, view_index)
        view = ViewPass(
            lambda: project(
                self.gaussians(),
                camera,
                plane_reach=reach,
                sh_degree=self._config.sh_degree(iteration),
            ),
            seen.background,
            self.memory_plan.split,
            rasterizer=self._rasterizer,
            pairs=self.pairs,
        )
        images = [
            term.bind(camera, seen.photograph, seen.exposure, seen.inside, beside)
            for term in on["image"]
        ]
        found, _ = view.backpropagate(images)
        found.update(backpropagate(on["model"], self.model.cloud))
        commit = partial(self.collect_exposure, camera.name, seen.exposure)
        return StepResult(report(self.terms, found), view.radii, view.guess, commit)

    def _covered(self, camera: Camera) -> Tensor:
        """Pixels whose rays meet the mesh. (H, W) bool"""
        cloud = self.model.cloud
        return rasterize_triangles(cloud.vertices.detach(), cloud.faces, camera).covered

    def gaussians(self) -> Gaussians:
        """Those that the triangles carry."""
        return self._placement.activate(self.model.cloud)

    def rendered_degree(self) -> int:
        """The degree reached."""
        return self._config.sh_degree(max(1, self._iteration))

    def export(self, iteration: int) -> None:
        """Write the refined Gaussians for other programs."""
        if self._export is not None:
            self._export(self.model.cloud)


def refine_terms(config: RefineConfig, pairs: PairsOfTriangles) -> tuple[LossTerm, ...]:
    """Every term of the stage; ``"model"`` terms are given the :class:`BoundCloud`."""
    weight = config.normal_consistency_factor

    def normal_consistency(cloud: BoundCloud) -> Tensor:
        return pairs.normal_consistency(cloud.vertices)

    consistency = LossTerm("normal_consistency", weight, "model", normal_consistency)
    surface = comparing_terms(MultiviewConfig()) if config.refine_surface_terms else ()
    return (COLOR, *surface, *([consistency] if weight > 0 else []))


TEST_INTERVAL = 5_000
_alone = partial(flag, group="only train_refined.py")


@dataclass(frozen=True, kw_only=True)
class RefineOptions(CaptureOptions):
    """A refinement run; of the checkpoint only cameras and exposures are used."""

    mesh_path: Path = _alone(
        MISSING, "coarse mesh (PLY with vertex colours); needed", short="-m", parse=Path,
        missing="pass the coarse mesh that extract_mesh.py made",
    )  # fmt: skip
    output_dir: Path | None = _alone(
        None, "parent of the run's folder; unset: output/refined/<scene>", short="-o", parse=Path
    )
    ply_dir: Path | None = None  # None for output_dir, or without that output/refined_ply/<scene>
    config: RefineConfig = field(default_factory=RefineConfig)
    checkpoint_interval: int = checkpoint_interval("only train_refined.py")
    preset: Preset = preset("only train_refined.py")
    export_ply: bool = flag(True, "write the refined Gaussians as PLY", group="refinement stage")
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)
    messages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name that all files of the refined model share."""
        weight = self.config.normal_consistency_factor
        return refined_name(self.mesh_path, weight, self.config.gaussians_per_triangle)

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

    def prepare(self, messages: Messages) -> tuple[StageRun[BoundCloud], BoundCloud]:
        """The run and the initial model; the run's folder is not touched yet."""
        config = self.config
        checkpoint, scene = load_capture(
            self, config.white_background, config.random_seed, messages
        )
        cloud = _start(self, scene.extent, messages)
        compute = self.compute
        span = 1, config.refinement_iterations
        exposures, known = capture_exposures(
            checkpoint, scene, config.exposure, span, compute.device, messages
        )
        read = scene_inputs(scene, tracks=config.refine_surface_terms)
        inputs = {**read, "mesh": file_digest(self.mesh_path), **known}
        identity = Identity(self.identity(), inputs, self.sources())

        def build(cloud: BoundCloud, store: ImageStore, console: Console) -> RefineStage:
            def export(refined: BoundCloud) -> None:
                write_gaussian_ply(self.ply_path, refined.freed())
                console.info(f"refined Gaussians: {self.ply_path}")

            planned = plan_strips(cloud, config, self.memory, scene, store, console)
            exports = export if self.export_ply else None
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

        results = (self.result, *([self.ply_path] if self.export_ply else []))
        directory = RunDirectory(self.directory, identity)
        return StageRun("refinement", scene, directory, _loop(self), build, results), cloud


def refine_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``train_refined.py``."""
    return parser_of(description, RefineOptions, BackendFlags, ScheduleFlags)


def refine_config(args: argparse.Namespace, **given: Any) -> RefineConfig:
    """Settings of the optimisation, the schedule scaled."""
    config = from_args(RefineConfig, args, optimizer=optimizer_config(args), **given)
    return config.with_schedule(args.schedule_scale)


def refine_options(args: argparse.Namespace) -> RefineOptions:
    """The run that was asked for."""
    options = from_args(RefineOptions, args, config=refine_config(args))
    if not options.mesh_path.is_file():
        raise UserError(f"--mesh_path {options.mesh_path}: no such file; pass the coarse mesh PLY")
    messages = (*options.memory.messages, *options.size.messages)
    return replace(options, compute=from_args(BackendFlags, args).choose(), messages=messages)


def _start(options: RefineOptions, extent: float, messages: Messages) -> BoundCloud:
    mesh, device = read_mesh_ply(options.mesh_path), options.compute.device
    messages(f"{mesh.n_vertices:,} vertices and {mesh.n_faces:,} triangles of {options.mesh_path}")
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
        first=1, last=config.refinement_iterations, seed=config.random_seed,
        log_interval=config.log_interval,
        checkpoint_interval=scaled(options.checkpoint_interval, config.schedule_scale),
        keep_checkpoints=options.run.keep_checkpoints,
        test_iterations=tuple(range(test_interval, config.refinement_iterations, test_interval)),
    )  # fmt: skip
