# SPDX-License-Identifier: Apache-2.0
"""The mesh stage: from a coarse model to mesh files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gaussian_splatting.cloud import opacities_of
from gaussian_splatting.data.cameras import middle_of
from gaussian_splatting.data.masks import hull_of
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.engine.run_directory import Identity, scene_inputs
from sugar_extractors.mesh import level_sets, meshing_backends, seams, tsdf
from sugar_extractors.mesh.level_sets import Box, LevelSetModel, SurfaceSamples
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG, MeshOptions
from sugar_extractors.mesh.meshing_backends import MIN_POINTS, PoissonConfig, decimated_to_error
from sugar_extractors.mesh.subdivision import covered_pixels, split_to_pixels
from sugar_extractors.results import alone_with, is_finished, publish, read_state
from sugar_scene import triangle_mesh
from sugar_scene.reprojection import NeighborViews
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.memory import format_bytes, memory_usage, reset_peak

BACKGROUND_HALF_SIDE = 4.0  # of the background's cube, in camera extents; 1 of the foreground's
MIN_BACKGROUND_SHARE = 0.001  # of the surface points: Poisson makes large blobs of a few


def region_boxes(options: MeshOptions, scene: Scene) -> tuple[Box, Box]:
    """Foreground and background box; a scene without a size needs one of the user."""
    if scene.extent <= 0 and options.bboxmin is None:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene "
            "has no size; give the foreground with --bboxmin and --bboxmax"
        )
    center = middle_of(scene.train_cameras)
    at = np.zeros(3) if options.center_bbox is False else center
    background = Box.cube(at, BACKGROUND_HALF_SIDE * scene.extent)
    if options.bboxmin is None:
        return Box.cube(at, scene.extent), background
    corners = np.array([options.bboxmin, options.bboxmax], dtype=np.float64)
    if options.center_bbox:
        corners = corners + center
    else:
        # Of captures far from the origin the user may know the original coordinates alone.
        corners = corners - offset_for(corners, scene.offset)
    low, high = (tuple(map(float, corner)) for corner in corners)
    return Box(low, high), background


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
    if not options.use_vanilla_3dgs and options.coarse_model_path is None:
        raise UserError(
            "-m/--coarse_model_path is missing; pass the .pt of a coarse run, or "
            "--use_vanilla_3dgs True to mesh the vanilla Gaussians"
        )
    if any(not 0 < level < 1 for level in options.surface_levels):
        raise UserError(
            f"--surface_level {options.surface_levels} must lie between 0 and 1; 0.3 is usual"
        )
    model = options.model
    if options.compute.device_reason:
        console.note(options.compute.device_reason)
    checkpoint, scene = load_views(options, console.note, seed=options.random_seed)
    poisson = options.poisson.resolved(any(c.shows_object for c in scene.train_cameras))
    options = replace(options, poisson=poisson)
    # Cameras and Gaussians; no photographs are read.
    inputs = {
        **scene_inputs(scene, photographs=False, tracks=options.reads_tracks),
        "Gaussians": file_digest(model or checkpoint.ply_path),
    }
    with contextlib.ExitStack() as stack:
        for path in options.mesh_paths:
            stack.enter_context(alone_with(path, OUTPUT_FLAG))
        missing = {}
        for job, path in zip(options.jobs, options.mesh_paths, strict=True):
            identity = Identity(options.identity(*job), inputs, options.sources())
            if is_finished([path], identity, options.overwrite, OUTPUT_FLAG):
                console.headline(f"exists already: {path}")
            else:
                missing[job] = identity
        if missing:
            _Extraction(options, console, checkpoint, scene).run(missing)
    return options.mesh_paths


class _Extraction:
    def __init__(
        self, options: MeshOptions, console: Console, checkpoint: ReferenceCheckpoint, scene: Scene
    ) -> None:
        self._options = options
        self._console = console
        self._scene = scene
        self._start = time.monotonic()
        self._largest_solver = 0
        device = options.compute.device
        self._cameras = scene.train_cameras
        reset_peak(device)
        self._boxes = region_boxes(options, scene)
        path = options.model
        if path is None:
            path = checkpoint.ply_path
            cloud = checkpoint.read_cloud(console.note)
        else:
            cloud = read_state(path, partial(cloud_from_state, kind="coarse SuGaR model"))
        self._cloud = cloud.to(device)
        self._hull = hull_of(self._cameras, device)
        self._covered_pixels = partial(covered_pixels, cameras=self._cameras, device=device)
        self._model = self._build_model(path)
        console.info(f"foreground {self._boxes[0]}, background {self._boxes[1]}")
        self._backend = meshing_backends.choose_backend(options.meshing_backend)
        console.info(f"meshing with {self._backend.name}")

    def run(self, jobs: Mapping[tuple[float, int], Identity]) -> None:
        options = self._options
        levels = sorted({level for level, _ in jobs})
        samples = {}
        if options.mesh_extractor == "poisson":
            samples = dict(zip(levels, self._sample(levels), strict=True))
        for level in levels:
            figures: dict[str, Any] = {}
            surface = samples.pop(level, None)
            if surface is None:
                meshes = self._tsdf_regions(figures)
            else:
                meshes = self._poisson_regions(surface, figures)
            # Vertices that land on one point would tear a closed surface open.
            if options.watertight or not options.project_mesh_on_surface_points:
                surface = None
            meshes = self._cut(meshes)
            if options.watertight and options.mesh_extractor == "tsdf":
                meshes = [self._closed(meshes, figures)]
            for target in [target for job_level, target in jobs if job_level == level]:
                self._finish(jobs[level, target], level, target, meshes, surface, figures)

    def _cut(self, meshes: Sequence[TriangleMesh]) -> list[TriangleMesh]:
        if self._hull is None:
            return list(meshes)
        kept = []
        for mesh in meshes:
            vertices = torch.from_numpy(mesh.vertices).to(self._options.compute.device)
            inside = self._hull.contains(vertices).cpu().numpy()
            cut = triangle_mesh.with_corners_in(replace(mesh, normals=None), inside)
            if cut.n_faces:
                kept.append(cut)
        n_before, n_after = (sum(mesh.n_faces for mesh in some) for some in (meshes, kept))
        self._console.info(f"{n_before - n_after:,} triangles outside of the masks cut off")
        if not kept:
            raise UserError(
                "the whole mesh lies outside of the masks; check that they belong to these "
                "photographs, or pass --mask_mode ignore or --masks none"
            )
        return kept

    def _without_unseen(self, mesh: TriangleMesh) -> TriangleMesh:
        """The triangles that some training view sees, and those that touch them."""
        seen = np.zeros(mesh.n_vertices, dtype=bool)
        seen[mesh.faces[self._covered_pixels(mesh) > 0]] = True
        kept = triangle_mesh.with_corners_in(mesh, seen)
        self._console.info(f"{mesh.n_faces - kept.n_faces:,} triangles that no view sees removed")
        return kept

    def _closed(self, meshes: Sequence[TriangleMesh], figures: dict[str, Any]) -> TriangleMesh:
        """One closed surface through what was fused, masks applied before it is closed."""
        fused = triangle_mesh.with_vertex_normals(triangle_mesh.merge_meshes(meshes))
        samples = SurfaceSamples(
            fused.vertices.astype(np.float32), fused.normals.astype(np.float32), fused.colors
        )
        if len(samples) < MIN_POINTS:
            raise UserError(
                f"only {len(samples)} points were fused, too few to close a surface through them; "
                "train the model longer"
            )
        start = time.monotonic()
        mesh = self._solved("closed surface: Poisson", samples, self._poisson(samples))
        figures["closing_seconds"] = round(time.monotonic() - start, 2)
        return mesh

    def _poisson(self, samples: SurfaceSamples) -> PoissonConfig:
        """The settings with their depth; closed surfaces are cut nowhere."""
        config = self._options.poisson.with_depth(samples.points, self._cameras)
        if not self._options.watertight:
            return config
        return replace(config, vertices_density_quantile=0.0)

    def _solved(self, name: str, samples: SurfaceSamples, poisson: PoissonConfig) -> TriangleMesh:
        """A reconstructed region; meanwhile the console says how long it takes, and how much."""
        own = memory_usage("cpu").current

        with self._console.waiting(name) as show:

            def watch(n_bytes: int) -> None:
                self._largest_solver = max(self._largest_solver, own + n_bytes)
                show({"memory": format_bytes(n_bytes)})

            return meshing_backends.reconstruct_region(samples, poisson, self._backend, watch)

    def _build_model(self, path: Path) -> LevelSetModel:
        cloud = self._cloud
        least = level_sets.MIN_OPACITY
        model = level_sets.build_model(cloud)
        opacities = opacities_of(cloud.opacity_logits).cpu().numpy()
        deciles = " ".join(f"{v:.2f}" for v in np.quantile(opacities, np.linspace(0, 1, 11)))
        self._console.info(
            f"{path}: {len(model):,} of {len(cloud):,} Gaussians are more opaque than "
            f"{least:g}; deciles of opacity {deciles}"
        )
        if len(model) == 0:
            raise UserError(
                f"{path}: no Gaussian has an opacity above {least:g} (the largest "
                f"is {opacities.max():.2f}), so there is no surface; train the model longer"
            )
        return model

    def _sample(self, levels: Sequence[float]) -> list[SurfaceSamples]:
        options = self._options
        with self._console.progress("surface points", 1, len(self._cameras)) as progress:
            return level_sets.collect_surface_samples(
                self._model,
                self._cameras,
                levels,
                target=options.n_surface_points,
                hull=self._hull,
                seed=options.random_seed,
                on_view=lambda done, n: progress.update(done, fields={"points": f"{n:,}"}),
            )

    def _poisson_regions(
        self, samples: SurfaceSamples, figures: dict[str, Any]
    ) -> list[TriangleMesh]:
        options = self._options
        if len(samples) < MIN_POINTS:
            raise UserError(
                f"only {len(samples)} surface points were found in all views: the density "
                "crosses no level there; lower --surface_level or train the model longer"
            )
        inside = self._boxes[0].contains(samples.points)
        parts = {"foreground": inside}
        if options.background_mesh:
            parts["background"] = self._boxes[1].contains(samples.points) & ~inside
        figures["surface_points"] = len(samples)
        meshes = []
        for name, mask in parts.items():
            figures[f"{name}_points"] = n = int(mask.sum())
            wanted = MIN_BACKGROUND_SHARE if name == "background" else 0.0
            if n < max(MIN_POINTS, wanted * len(samples)):
                self._console.info(left_out(options, name, n, samples.points))
                continue
            start = time.monotonic()
            region = samples.select(mask)
            poisson = self._poisson(region)
            figures[f"{name}_depth"] = depth = poisson.poisson_depth
            self._console.info(f"{name}: Poisson of {n:,} points, octree depth {depth}")
            mesh = self._solved(f"{name}: Poisson", region, poisson)
            figures[f"{name}_seconds"] = seconds = round(time.monotonic() - start, 2)
            self._console.info(
                f"{name}: {mesh.n_faces:,} triangles before decimation ({seconds:.1f} s)"
            )
            meshes.append(mesh)
        if not any(mesh.n_faces for mesh in meshes):
            raise UserError(
                f"no surface in the foreground or background box; the surface points lie in "
                f"{span(samples.points)}: set --bboxmin and --bboxmax"
            )
        return meshes

    def _tsdf_regions(self, figures: dict[str, Any]) -> list[TriangleMesh]:
        options, scene, (inner, outer) = self._options, self._scene, self._boxes
        config = options.tsdf
        meshes = []
        if config.tsdf_depth == "plane":
            neighbors = NeighborViews(self._cameras, scene.extent, observations=scene.observations)
            gaussians = self._cloud.detached().activate()
            render = tsdf.plane_renderer(gaussians, self._cameras, neighbors, scene.extent)
        else:
            render = tsdf.view_renderer(self._cloud, config)
        render = tsdf.kept(tsdf.carved_renderer(render, self._hull), self._cameras)
        parts = {"foreground": inner}
        if options.background_mesh and not options.watertight:
            parts["background"] = outer
        for name, box in parts.items():
            start = time.monotonic()
            observed = None
            if config.margin is not None:
                margin = config.margin * scene.extent
                observed = tsdf.observed_region(scene.observations, box, margin)
            fusion = tsdf.Fusion(render, self._cameras, box, config, self._console)
            fused = fusion.surface(observed)
            figures[f"{name}_voxel"] = fused.voxel_size
            figures[f"{name}_voxels"] = fused.n_voxels
            figures[f"{name}_seconds"] = round(time.monotonic() - start, 2)
            if fused.mesh.n_faces == 0 and name == "foreground" and options.bboxmin is not None:
                raise UserError(
                    f"no surface in the box {box}; widen --bboxmin and --bboxmax or check that "
                    "they are in world coordinates"
                )
            mesh = fused.mesh
            if len(parts) > 1:
                mesh = seams.cut_at_box(mesh, inner, inside=name == "foreground")
            if mesh.n_faces:
                meshes.append(mesh)
        if not meshes:
            raise UserError(
                f"no surface in the foreground or background box {outer}; set --bboxmin and "
                "--bboxmax"
            )
        return meshes

    def _finish(
        self,
        identity: Identity,
        level: float,
        target: int,
        meshes: Sequence[TriangleMesh],
        surface: SurfaceSamples | None,
        figures: Mapping[str, Any],
    ) -> None:
        path = self._options.mesh_path(level, target)
        with self._console.waiting(f"{path.name}: {target:,} triangles"):
            box = self._boxes[0] if self._options.mesh_extractor == "tsdf" else None
            splits = self._options.triangle_pixels > 0 and self._options.mesh_error is None
            decimate = partial(self._backend.decimate, n_faces=target // 2 if splits else target)
            if (pixels := self._options.mesh_error) is not None:
                decimate = partial(
                    decimated_to_error,
                    pixels=pixels,
                    cameras=self._cameras,
                    n_faces=target,
                    decimate=self._backend.decimate,
                )
            mesh = meshing_backends.finish_mesh(meshes, decimate, surface, box)
        if self._options.watertight:
            # Decimation tears a few edges open, and Poisson ends at the borders of its cube.
            mesh = triangle_mesh.with_vertex_normals(triangle_mesh.with_holes_filled(mesh))
        elif self._options.remove_unseen:
            mesh = self._without_unseen(mesh)
        if splits:
            limits = self._options.triangle_pixels, target * len(meshes)
            mesh = split_to_pixels(mesh, self._covered_pixels(mesh), *limits)
            mesh = triangle_mesh.with_vertex_normals(mesh)
        if mesh.n_faces == 0:
            raise UserError(
                f"{path.name}: no triangle is left after the clean-up; use more --surface_points "
                "or a larger --decimation_target"
            )
        usage = memory_usage(self._options.compute.device)
        solver = self._largest_solver if usage.kind == "RSS" else 0
        result = {
            **figures,
            "seconds": round(time.monotonic() - self._start, 2),
            "peak_bytes": max(usage.peak, solver),
            "backend": self._backend.name,
            "vertices": mesh.n_vertices,
            "faces": mesh.n_faces,
            **asdict(triangle_mesh.topology(mesh)),
        }
        with publish([path], identity, lambda: result) as temporary:
            triangle_mesh.write_mesh_ply(temporary[path], mesh)
        self._console.info(f"{mesh.n_vertices:,} vertices, {mesh.n_faces:,} triangles: {path}")
