# SPDX-License-Identifier: Apache-2.0
"""The mesh stage: from a coarse model to mesh files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera, middle_of
from gaussian_splatting.data.masks import VisualHull, hull_of, shows_object
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.engine.run_directory import Identity, scene_inputs
from sugar_extractors.mesh.level_sets import (
    Box,
    LevelSetModel,
    SurfaceSamples,
    build_model,
    collect_surface_samples,
)
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG, MeshOptions
from sugar_extractors.mesh.meshing_backends import (
    MIN_POINTS,
    MeshingBackend,
    PoissonConfig,
    PycolmapBackend,
    SolverConfig,
    choose_backend,
    finish_mesh,
    reconstruct_region,
)
from sugar_extractors.mesh.observed_region import ObservedRegion, observed_region
from sugar_extractors.mesh.plane_views import plane_renderer
from sugar_extractors.mesh.tsdf import Renderer, carved_renderer, fuse_region, view_renderer
from sugar_extractors.results import alone_with, is_finished, publish
from sugar_scene.mesh.triangle_mesh import (
    TriangleMesh,
    merge_meshes,
    topology,
    with_holes_filled,
    with_vertex_normals,
    without_unused_vertices,
    write_mesh_ply,
)
from sugar_scene.multiview.reprojection import NeighborViews
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.flags import require_box
from sugar_utils.memory import format_bytes, memory_usage, reset_peak


def require_extent(options: MeshOptions, scene: Scene) -> None:
    """Refuse a scene without a size, unless the user gives a box."""
    if scene.extent <= 0 and options.bboxmin is None:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene "
            "has no size; give the foreground with --bboxmin and --bboxmax"
        )


def region_boxes(options: MeshOptions, scene: Scene) -> tuple[Box, Box]:
    """Foreground and background box."""
    center = middle_of(scene.train_cameras)
    at = np.zeros(3) if options.center_bbox is False else center
    if options.bboxmin is not None:
        foreground = Box(options.bboxmin, options.bboxmax)
        if options.center_bbox:
            foreground = foreground.shifted(center)
    else:
        foreground = Box.cube(at, options.foreground_factor * scene.extent)
    return foreground, Box.cube(at, options.background_factor * scene.extent)


def left_out(options: MeshOptions, name: str, n: int, points: np.ndarray) -> str:
    """What to say of a region with few of the points; an empty box of the user is an error."""
    if name == "foreground" and options.bboxmin is not None:
        moved = ", the box was moved by --center_bbox True" if options.center_bbox else ""
        raise UserError(
            f"the box of --bboxmin and --bboxmax holds {n} of {len(points):,} surface "
            f"points; they lie in {span(points)} (world coordinates{moved})"
        )
    return f"{name}: only {n} of {len(points):,} surface points, left out"


def span(points: np.ndarray) -> str:
    """Box of the middle 98 % of points on each axis. (P, 3)"""
    low, high = np.quantile(points[:: max(1, len(points) // 100_000)], (0.01, 0.99), axis=0)
    return str(Box(tuple(map(float, low)), tuple(map(float, high))))


def extract_coarse_mesh(options: MeshOptions, console: Console | None = None) -> list[Path]:
    """Extract meshes of all levels and decimation targets, each with a ``.json`` file beside it.

    Meshes that exist with the same settings are not made again.
    """
    console = console or Console()
    _check(options)
    model = options.model
    if options.compute.device_reason:
        console.info(options.compute.device_reason)
    checkpoint, scene = load_views(options, console.info, seed=options.random_seed)
    poisson = options.poisson.resolved(shows_object(scene.train_cameras))
    options = replace(options, poisson=poisson)
    jobs = {job: options.mesh_path(*job) for job in options.jobs}
    # Cameras and Gaussians; no photographs are read.
    inputs = {
        **scene_inputs(scene, photographs=False, tracks=options.reads_tracks),
        "Gaussians": file_digest(model or checkpoint.ply_path),
    }
    with contextlib.ExitStack() as stack:
        for path in jobs.values():
            stack.enter_context(alone_with(path, OUTPUT_FLAG))
        missing = {}
        for job, path in jobs.items():
            identity = Identity(options.identity(*job), inputs, options.sources())
            if is_finished([path], identity, options.overwrite, OUTPUT_FLAG):
                console.info(f"exists already: {path}")
            else:
                missing[job] = identity
        if missing:
            _Extraction(options, console).run(missing, checkpoint, scene)
    return options.mesh_paths


def _check(options: MeshOptions) -> None:
    if not options.use_vanilla_3dgs and options.coarse_model_path is None:
        raise UserError(
            "-m/--coarse_model_path is missing; pass the .pt of a coarse run, or "
            "--use_vanilla_3dgs True to mesh the vanilla Gaussians"
        )
    require_box(options.bboxmin, options.bboxmax)
    if any(not 0 < level < 1 for level in options.surface_levels):
        raise UserError(
            f"--surface_level {options.surface_levels} must lie between 0 and 1; 0.3 is usual"
        )


class _Extraction:
    """One run over some (level, target) pairs."""

    def __init__(self, options: MeshOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._start = time.monotonic()
        self._hull: VisualHull | None = None
        self._cameras: list[Camera] = []
        self._largest_solver = 0

    def run(
        self,
        jobs: Mapping[tuple[float, int], Identity],
        checkpoint: ReferenceCheckpoint,
        scene: Scene,
    ) -> None:
        options = self._options
        self._start = time.monotonic()
        device = options.compute.device
        reset_peak(device)
        require_extent(options, scene)
        cloud, path = _read_cloud(options, checkpoint, self._console.info)
        cloud = cloud.to(device)
        self._hull = hull_of(scene.train_cameras, device)
        self._cameras = scene.train_cameras
        model = self._build_model(cloud, path)
        boxes = region_boxes(options, scene)
        self._console.info(f"foreground {boxes[0]}, background {boxes[1]}")
        backend = choose_backend(options.meshing_backend)
        self._console.info(f"meshing with {backend.name}")
        self._advise(backend)
        levels = sorted({level for level, _ in jobs})
        samples = {}
        if options.mesh_extractor == "poisson":
            samples = dict(zip(levels, self._sample(model, scene, levels), strict=True))
        for level in levels:
            if options.mesh_extractor == "tsdf":
                regions = self._tsdf_regions(model, cloud, scene, boxes)
            else:
                # Vertices that land on one point would tear a closed surface open.
                project = options.project_mesh_on_surface_points and not options.watertight
                regions = self._poisson_regions(samples.pop(level), boxes, backend, project)
            meshes, surface, figures = regions
            if options.watertight and options.mesh_extractor == "tsdf":
                meshes = self._closed(meshes, backend, figures)
            else:
                meshes = self._cut(meshes)
            for target in [target for job_level, target in jobs if job_level == level]:
                identity = jobs[level, target]
                self._finish(identity, level, target, meshes, surface, figures, backend)

    def _inside(self, points: np.ndarray) -> np.ndarray:
        """Points inside of the masks' hull. (P, 3) -> (P,) bool"""
        device = self._options.compute.device
        return self._hull.contains(torch.from_numpy(points).to(device)).cpu().numpy()

    def _cut(self, meshes: Sequence[TriangleMesh]) -> list[TriangleMesh]:
        if self._hull is None:
            return list(meshes)
        kept = []
        for mesh in meshes:
            inside = self._inside(mesh.vertices)
            faces = mesh.faces[inside[mesh.faces].any(axis=1)]
            if len(faces):
                cut = TriangleMesh(mesh.vertices, faces, mesh.colors)
                kept.append(without_unused_vertices(cut))
        n_before, n_after = (sum(mesh.n_faces for mesh in some) for some in (meshes, kept))
        self._console.info(f"{n_before - n_after:,} triangles outside of the masks cut off")
        if not kept:
            raise UserError(
                "the whole mesh lies outside of the masks; check that they belong to these "
                "photographs, or pass --mask_mode ignore or --masks none"
            )
        return kept

    def _closed(
        self, meshes: Sequence[TriangleMesh], backend: MeshingBackend, figures: dict[str, Any]
    ) -> list[TriangleMesh]:
        """One closed surface through what was fused, masks applied before it is closed."""
        fused = with_vertex_normals(merge_meshes(self._cut(meshes)))
        samples = SurfaceSamples(
            fused.vertices.astype(np.float32), fused.normals.astype(np.float32), fused.colors
        )
        if len(samples) < MIN_POINTS:
            raise UserError(
                f"only {len(samples)} points were fused, too few to close a surface through them; "
                "train the model longer"
            )
        start = time.monotonic()
        poisson = self._options.poisson.with_depth(samples.points, self._cameras)
        closed = replace(poisson, vertices_density_quantile=0.0)
        mesh = self._solved("closed surface: Poisson", samples, closed, backend)
        figures["closing_seconds"] = round(time.monotonic() - start, 2)
        return [mesh]

    def _solved(
        self, name: str, samples: SurfaceSamples, poisson: PoissonConfig, backend: MeshingBackend
    ) -> TriangleMesh:
        """A reconstructed region; meanwhile the console says how long it takes, and how much."""
        own = memory_usage("cpu").current

        with self._console.waiting(name) as show:

            def watch(n_bytes: int) -> None:
                self._largest_solver = max(self._largest_solver, own + n_bytes)
                show({"memory": format_bytes(n_bytes)})

            return reconstruct_region(samples, poisson, backend, watch)

    def _peak(self) -> int:
        usage = memory_usage(self._options.compute.device)
        return max(usage.peak, self._largest_solver) if usage.kind == "RSS" else usage.peak

    def _advise(self, backend: MeshingBackend) -> None:
        """Name constants that were given but that the library does not know."""
        given, usual = self._options.poisson.solver, SolverConfig()
        idle = [
            f"--{name}"
            for name in ("poisson_width", "poisson_scale", "poisson_linear_fit")
            if getattr(given, name) != getattr(usual, name)
        ]
        if idle and backend.name == PycolmapBackend.name:
            self._console.info(f"{', '.join(idle)}: no effect without Open3D")

    def _build_model(self, cloud: GaussianCloud, path: Path) -> LevelSetModel:
        options, console = self._options, self._console
        model = build_model(
            cloud,
            min_opacity=options.min_opacity,
            n_neighbors=options.mesh_neighbors,
            diamond_extent=options.diamond_extent,
            density_factor=options.density_factor,
        )
        opacities = cloud.opacity_logits.sigmoid().squeeze(-1).cpu().numpy()
        deciles = " ".join(f"{v:.2f}" for v in np.quantile(opacities, np.linspace(0, 1, 11)))
        console.info(f"{path}: {len(model):,} of {len(cloud):,} Gaussians are more opaque than "
                     f"{options.min_opacity:g}; deciles of opacity {deciles}")  # fmt: skip
        if len(model) == 0:
            raise UserError(
                f"{path}: no Gaussian has an opacity above {options.min_opacity:g} (the largest "
                f"is {opacities.max():.2f}), so there is no surface; train the model longer"
            )
        return model

    def _sample(
        self, model: LevelSetModel, scene: Scene, levels: Sequence[float]
    ) -> list[SurfaceSamples]:
        options, cameras = self._options, scene.train_cameras
        with self._console.progress("surface points", 1, len(cameras)) as progress:
            return collect_surface_samples(
                model,
                cameras,
                levels,
                target=options.n_surface_points,
                n_samples=options.ray_samples,
                reach=options.ray_reach,
                candidates_per_point=options.candidates_per_point,
                hull=self._hull,
                seed=options.random_seed,
                on_view=lambda done, n: progress.update(done, fields={"points": f"{n:,}"}),
            )

    def _poisson_regions(
        self,
        samples: SurfaceSamples,
        boxes: tuple[Box, Box],
        backend: MeshingBackend,
        project: bool,
    ) -> _Regions:
        options = self._options
        if len(samples) < MIN_POINTS:
            raise UserError(
                f"only {len(samples)} surface points were found in all views: the density "
                "crosses no level there; lower --surface_level or train the model longer"
            )
        inside = boxes[0].contains(samples.points)
        outside = boxes[1].contains(samples.points) & ~inside
        parts = {"foreground": inside}
        if options.background_mesh:
            parts["background"] = outside
        figures: dict[str, Any] = {"surface_points": len(samples)}
        meshes = []
        for name, mask in parts.items():
            n = int(mask.sum())
            figures[f"{name}_points"] = n
            wanted = options.min_background_share if name == "background" else 0.0
            if n < max(MIN_POINTS, wanted * len(samples)):
                self._console.info(left_out(options, name, n, samples.points))
                continue
            start = time.monotonic()
            region = samples.select(mask)
            poisson = options.poisson.with_depth(region.points, self._cameras)
            if options.watertight:
                poisson = replace(poisson, vertices_density_quantile=0.0)
            figures[f"{name}_depth"] = poisson.solver.poisson_depth
            self._console.info(
                f"{name}: Poisson of {n:,} points, octree depth {poisson.solver.poisson_depth}"
            )
            mesh = self._solved(f"{name}: Poisson", region, poisson, backend)
            figures[f"{name}_seconds"] = round(time.monotonic() - start, 2)
            self._console.info(
                f"{name}: {mesh.n_faces:,} triangles before decimation "
                f"({figures[f'{name}_seconds']:.1f} s)"
            )
            meshes.append(mesh)
        if not any(mesh.n_faces for mesh in meshes):
            raise UserError(
                f"no surface in the foreground or background box; the surface points lie in "
                f"{span(samples.points)}: set --bboxmin and --bboxmax"
            )
        return meshes, samples if project else None, figures

    def _tsdf_regions(
        self, model: LevelSetModel, cloud: GaussianCloud, scene: Scene, boxes: tuple[Box, Box]
    ) -> _Regions:
        options, figures, meshes = self._options, {}, []
        render = carved_renderer(self._renderer(model, cloud, scene), self._hull)
        parts = {"foreground": (boxes[0], None)}
        if options.background_mesh and not options.watertight:
            parts["background"] = (boxes[1], boxes[0])
        for name, (box, hole) in parts.items():
            start = time.monotonic()
            fused = fuse_region(
                render,
                scene.train_cameras,
                box,
                hole,
                options.tsdf,
                self._console,
                self._observed(scene, box),
            )
            figures[f"{name}_voxel"] = fused.voxel_size
            figures[f"{name}_voxels"] = fused.n_voxels
            figures[f"{name}_seconds"] = round(time.monotonic() - start, 2)
            if fused.mesh.n_faces == 0 and name == "foreground" and options.bboxmin is not None:
                raise UserError(
                    f"no surface in the box {box}; widen --bboxmin and --bboxmax or check that "
                    "they are in world coordinates"
                )
            if fused.mesh.n_faces:
                meshes.append(fused.mesh)
        if not meshes:
            raise UserError(
                f"no surface in the foreground or background box {boxes[1]}; set --bboxmin and "
                "--bboxmax"
            )
        return meshes, None, figures

    def _observed(self, scene: Scene, box: Box) -> ObservedRegion | None:
        """Where the surface within a box may be; None for anywhere."""
        margin = self._options.tsdf.margin
        if margin is None:
            return None
        return observed_region(scene.observations, box, margin * scene.extent)

    def _renderer(self, model: LevelSetModel, cloud: GaussianCloud, scene: Scene) -> Renderer:
        config = self._options.tsdf
        if config.tsdf_depth != "plane":
            return view_renderer(model, cloud, config)
        cameras = scene.train_cameras
        neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
        gaussians = cloud.detached().activate()
        return plane_renderer(gaussians, cameras, neighbors, scene.extent)

    def _finish(
        self,
        identity: Identity,
        level: float,
        target: int,
        meshes: Sequence[TriangleMesh],
        surface: SurfaceSamples | None,
        figures: dict[str, Any],
        backend: MeshingBackend,
    ) -> None:
        path = self._options.mesh_path(level, target)
        with self._console.waiting(f"{path.name}: {target:,} triangles"):
            mesh = finish_mesh(meshes, target, backend, surface)
        if self._options.watertight:
            # Decimation tears a few edges open, and Poisson ends at the borders of its cube.
            mesh = with_vertex_normals(with_holes_filled(mesh))
        if mesh.n_faces == 0:
            raise UserError(
                f"{path.name}: no triangle is left after the clean-up; use more --surface_points "
                "or a larger --decimation_target"
            )
        result = {
            **figures,
            "seconds": round(time.monotonic() - self._start, 2),
            "peak_bytes": self._peak(),
            "backend": backend.name,
            "vertices": mesh.n_vertices,
            "faces": mesh.n_faces,
            **asdict(topology(mesh)),
        }
        with publish([path], identity, lambda: result) as temporary:
            write_mesh_ply(temporary[path], mesh)
        self._console.info(f"{mesh.n_vertices:,} vertices, {mesh.n_faces:,} triangles: {path}")


_Regions = tuple[list[TriangleMesh], "SurfaceSamples | None", dict[str, Any]]


def _read_cloud(
    options: MeshOptions, checkpoint: ReferenceCheckpoint, notify: Callable[[str], None]
) -> tuple[GaussianCloud, Path]:
    path = options.model
    if path is None:
        return checkpoint.read_cloud(notify), checkpoint.ply_path
    try:
        return cloud_from_state(load_payload(path)["state_dict"], "coarse SuGaR model"), path
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error
