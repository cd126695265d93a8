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

from gaussian_splatting.core.cloud import GaussianCloud, opacities_of
from gaussian_splatting.data.cameras import middle_of
from gaussian_splatting.data.masks import hull_of
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh import depth_views, level_sets, meshing_backends, seams
from sugar_extractors.mesh.holes.hole_evidence import ViewEvidence
from sugar_extractors.mesh.holes.hole_filling import fill_holes
from sugar_extractors.mesh.level_sets import LevelSetModel, SurfaceSamples
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG, MeshOptions
from sugar_extractors.mesh.mesh_finishing import decimated_to_error, finish_mesh
from sugar_extractors.mesh.meshing_backends import PoissonConfig
from sugar_extractors.mesh.observed_region import observed_region, without_bare_border
from sugar_extractors.mesh.poisson_regions import MIN_POINTS, reconstruct_region
from sugar_extractors.mesh.tetrahedra import TetrahedraFusion
from sugar_extractors.mesh.tsdf import FusedRegion, Fusion, TsdfConfig
from sugar_extractors.results import read_state
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import Renderer
from sugar_scene.regions import Box
from sugar_scene.reprojection import NeighborViews
from sugar_scene.subdivision import covered_pixels, split_to_pixels, visible_part
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.memory import format_bytes, memory_usage, reset_peak
from sugar_utils.recipe import Recipe, alone_with

BACKGROUND_HALF_SIDE = 4.0  # of the background's cube, in camera extents; 1 of the foreground's
MIN_BACKGROUND_SHARE = 0.001  # of the surface points: Poisson makes large blobs of a few


def region_boxes(options: MeshOptions, scene: Scene) -> tuple[Box, Box]:
    """Return the foreground and background box.

    Raises:
        UserError: The scene has no size, and the user gave no box.
    """
    if scene.extent <= 0 and options.bboxmin is None:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene "
            "has no size; give the foreground with --bboxmin and --bboxmax"
        )
    center = middle_of(scene.train_cameras)
    box_center = np.zeros(3) if options.center_bbox is False else center
    background = Box.cube(box_center, BACKGROUND_HALF_SIDE * scene.extent)
    if options.bboxmin is None:
        return Box.cube(box_center, scene.extent), background
    corners = np.array([options.bboxmin, options.bboxmax], dtype=np.float64)
    if options.center_bbox:
        corners = corners + center
    else:
        # Of captures far from the origin the user may know the original coordinates alone.
        corners = corners - offset_for(corners, scene.offset)
    low, high = corners.tolist()
    return Box(tuple(low), tuple(high)), background


def depth_renderer(cloud: GaussianCloud, scene: Scene, config: TsdfConfig) -> Renderer:
    """Return the renderer of depth that the settings of a fusion ask for."""
    if config.tsdf_depth != "plane":
        return depth_views.view_renderer(cloud, config.min_alpha)
    cameras = scene.train_cameras
    neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
    gaussians = cloud.detached().activate()
    return depth_views.plane_renderer(gaussians, cameras, neighbors, scene.extent)


def left_out(options: MeshOptions, name: str, n: int, points: np.ndarray) -> str:
    """Return a message about a region with few points; an empty box of the user is an error.

    Args:
        name: Of the region.
        n: Points in it.
        points: All of them. (P, 3)
    """
    if name == "foreground" and options.bboxmin is not None:
        moved = ", the box was moved by --center_bbox True" if options.center_bbox else ""
        raise UserError(
            f"the box of --bboxmin and --bboxmax holds {n} of {len(points):,} surface "
            f"points; they lie in {span(points)} (world coordinates{moved})"
        )
    return f"{name}: only {n} of {len(points):,} surface points, left out"


def span(points: np.ndarray) -> str:
    """Return the box of the middle 98 % of points, (P, 3), on each axis, as text."""
    stride = max(1, len(points) // 100_000)
    low, high = np.quantile(points[::stride], (0.01, 0.99), axis=0)
    return str(Box.of_corners(low, high))


def extract_coarse_mesh(options: MeshOptions, console: Console | None = None) -> list[Path]:
    """Extract meshes of all levels and decimation targets, each with a ``.json`` file beside it.

    Meshes that exist with the same settings are not made again.

    Raises:
        UserError: Flags are wrong, or there is no surface.
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
            identity = Recipe(options.identity(*job), inputs, options.sources())
            if identity.is_finished([path], options.overwrite, OUTPUT_FLAG):
                console.headline(f"exists already: {path}")
            else:
                missing[job] = identity
        if missing:
            _Extraction(options, console, checkpoint, scene).run(missing)
    return options.mesh_paths


class _Extraction:
    """One run of the mesh stage: the model, the cameras, and the regions to be meshed."""

    def __init__(
        self, options: MeshOptions, console: Console, checkpoint: ReferenceCheckpoint, scene: Scene
    ) -> None:
        self._options = options
        self._console = console
        self._scene = scene
        self._start = time.monotonic()
        self._largest_solver = 0
        self._voxel_sizes: dict[str, float] = {}  # of the regions that were fused, by name
        device = options.compute.device
        self._cameras = scene.train_cameras
        reset_peak(device)
        self._boxes = region_boxes(options, scene)
        path = options.model
        if path is None:
            path = checkpoint.ply_path
            cloud = checkpoint.read_cloud(console.note, scene.offset)
        else:
            cloud = read_state(path, partial(cloud_from_state, kind="coarse SuGaR model"))
        self._cloud = cloud.to(device)
        self._hull = hull_of(self._cameras, device)
        self._covered_pixels = partial(covered_pixels, cameras=self._cameras, device=device)
        self._model = self._build_model(path)
        console.info(f"foreground {self._boxes[0]}, background {self._boxes[1]}")
        self._backend = meshing_backends.choose_backend(options.meshing_backend)
        console.info(f"meshing with {self._backend.name}")

    def run(self, jobs: Mapping[tuple[float, int], Recipe]) -> None:
        """Extract a mesh for each pair of a level and a number of triangles."""
        options = self._options
        levels = sorted({level for level, _ in jobs})
        samples = {}
        if not options.is_fused:
            samples = dict(zip(levels, self._sample(levels), strict=True))
        for level in levels:
            figures: dict[str, Any] = {}
            surface = samples.pop(level, None)
            if surface is None:
                meshes = self._fused_regions(figures)
            else:
                meshes = self._poisson_regions(surface, figures)
            # Vertices that land on one point would tear a closed surface open.
            if options.watertight or not options.project_mesh_on_surface_points:
                surface = None
            meshes = self._cut(meshes)
            if options.watertight and options.is_fused:
                meshes = [self._closed(meshes, figures)]
            for (job_level, target), identity in jobs.items():
                if job_level == level:
                    path = options.mesh_path(level, target)
                    mesh_figures = dict(figures)
                    mesh = self._finished(path, target, meshes, surface, mesh_figures)
                    self._write(path, identity, mesh, mesh_figures)

    def _cut(self, meshes: Sequence[TriangleMesh]) -> list[TriangleMesh]:
        """Cut off triangles outside of the masks."""
        if self._hull is None:
            return list(meshes)
        remaining = []
        for mesh in meshes:
            vertices = torch.from_numpy(mesh.vertices).to(self._options.compute.device)
            inside = self._hull.contains(vertices).cpu().numpy()
            cut = triangle_mesh.with_corners_in(replace(mesh, normals=None), inside)
            if cut.n_faces:
                remaining.append(cut)
        n_before = sum(mesh.n_faces for mesh in meshes)
        n_after = sum(mesh.n_faces for mesh in remaining)
        self._console.info(f"{n_before - n_after:,} triangles outside of the masks cut off")
        if not remaining:
            raise UserError(
                "the whole mesh lies outside of the masks; check that they belong to these "
                "photographs, or pass --mask_mode ignore or --masks none"
            )
        return remaining

    def _without_unseen(self, mesh: TriangleMesh) -> TriangleMesh:
        """Return the triangles that some training view sees, and those that touch them."""
        visible = visible_part(mesh, self._covered_pixels(mesh))
        n_removed = mesh.n_faces - visible.n_faces
        self._console.info(f"{n_removed:,} triangles that no view sees removed")
        return visible

    def _closed(self, meshes: Sequence[TriangleMesh], figures: dict[str, Any]) -> TriangleMesh:
        """Return one closed surface of the fused depth; masks were applied before."""
        fused = triangle_mesh.with_vertex_normals(triangle_mesh.merge_meshes(meshes))
        if fused.normals is None:
            raise ValueError("a mesh with normals has none")
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
        """Return the settings with their depth; closed surfaces are cut nowhere."""
        config = self._options.poisson.with_depth(samples.points, self._cameras)
        if not self._options.watertight:
            return config
        return replace(config, vertices_density_quantile=0.0)

    def _solved(self, name: str, samples: SurfaceSamples, poisson: PoissonConfig) -> TriangleMesh:
        """Reconstruct a region; meanwhile the console shows elapsed time and memory."""
        own_bytes = memory_usage("cpu").current

        with self._console.waiting(name) as show:

            def watch(n_bytes: int) -> None:
                self._largest_solver = max(self._largest_solver, own_bytes + n_bytes)
                show({"memory": format_bytes(n_bytes)})

            return reconstruct_region(samples, poisson, self._backend, watch)

    def _build_model(self, path: Path) -> LevelSetModel:
        """Return the opaque Gaussians; there have to be some."""
        cloud = self._cloud
        least = level_sets.MIN_OPACITY
        model = level_sets.build_model(cloud)
        opacities = opacities_of(cloud.opacity_logits).cpu().numpy()
        deciles = np.quantile(opacities, np.linspace(0, 1, 11))
        decile_text = " ".join(f"{value:.2f}" for value in deciles)
        self._console.info(
            f"{path}: {len(model):,} of {len(cloud):,} Gaussians are more opaque than "
            f"{least:g}; deciles of opacity {decile_text}"
        )
        if len(model) == 0:
            raise UserError(
                f"{path}: no Gaussian has an opacity above {least:g} (the largest "
                f"is {opacities.max():.2f}), so there is no surface; train the model longer"
            )
        return model

    def _sample(self, levels: Sequence[float]) -> list[SurfaceSamples]:
        """Return surface points of each level."""
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
        """Reconstruct foreground and background; add their ``figures`` to the record."""
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
            n = int(mask.sum())
            figures[f"{name}_points"] = n
            min_share = MIN_BACKGROUND_SHARE if name == "background" else 0.0
            if n < max(MIN_POINTS, min_share * len(samples)):
                self._console.info(left_out(options, name, n, samples.points))
                continue
            start = time.monotonic()
            region = samples.select(mask)
            poisson = self._poisson(region)
            depth = poisson.poisson_depth
            figures[f"{name}_depth"] = depth
            self._console.info(f"{name}: Poisson of {n:,} points, octree depth {depth}")
            mesh = self._solved(f"{name}: Poisson", region, poisson)
            seconds = round(time.monotonic() - start, 2)
            figures[f"{name}_seconds"] = seconds
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

    def _fused_regions(self, figures: dict[str, Any]) -> list[TriangleMesh]:
        """Fuse foreground and background; add their ``figures`` to the record."""
        options = self._options
        inner, outer = self._boxes
        parts = {"foreground": inner}
        if options.background_mesh and not options.watertight:
            parts["background"] = outer
        render = self._renderer()
        meshes = []
        for name, box in parts.items():
            start = time.monotonic()
            region = self._fused(render, box, None if name == "foreground" else inner)
            self._voxel_sizes[name] = region.voxel_size
            figures[f"{name}_voxel"] = region.voxel_size
            counted = "corners" if options.mesh_extractor == "tetrahedra" else "voxels"
            figures[f"{name}_{counted}"] = region.n_voxels
            figures[f"{name}_seconds"] = round(time.monotonic() - start, 2)
            mesh = region.mesh
            if mesh.n_faces == 0 and name == "foreground" and options.bboxmin is not None:
                raise UserError(
                    f"no surface in the box {box}; widen --bboxmin and --bboxmax or check that "
                    "they are in world coordinates"
                )
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

    def _renderer(self) -> Renderer:
        """Return the renderer of depth that the settings ask for, within the masks."""
        render = depth_renderer(self._cloud, self._scene, self._options.tsdf)
        carved = depth_views.carved_renderer(render, self._hull)
        return depth_views.cached_renderer(carved, self._cameras)

    def _fused(self, render: Renderer, box: Box, excluded: Box | None) -> FusedRegion:
        """Return the surface within a box, near the points of the reconstruction if asked for.

        Args:
            render: Depth of views.
            box: Where the surface is.
            excluded: Part of it that another mesh covers, which need not be right; None for none.
        """
        config = self._options.tsdf
        region = None
        if config.margin is not None:
            margin = config.margin * self._scene.extent
            region = observed_region(self._scene.observations, box, margin)
        fusion = Fusion(render, self._cameras, box, config, self._console)
        if self._options.mesh_extractor == "tetrahedra":
            gaussians = self._cloud.detached().activate()
            fused = TetrahedraFusion(fusion, gaussians, excluded).surface(region)
        else:
            fused = fusion.surface(region)
        # Masks say where an object ends.
        if region is None or self._hull is not None:
            return fused
        return self._without_bare_border(fused, render)

    def _without_bare_border(self, fused: FusedRegion, render: Renderer) -> FusedRegion:
        """Return a surface without untextured parts outside the points of all boxes."""
        config = self._options.tsdf
        points_region = observed_region(self._scene.observations, self._boxes[1], 0.0)
        if points_region is None or fused.mesh.n_faces == 0:
            return fused
        reach = config.truncation * fused.voxel_size
        cut = without_bare_border(
            fused.mesh, points_region, render, self._cameras, reach, config.min_component
        )
        n_cut = fused.mesh.n_faces - cut.n_faces
        self._console.info(f"{n_cut:,} triangles without texture cut off at borders")
        return replace(fused, mesh=cut)

    def _finished(
        self,
        path: Path,
        target: int,
        meshes: Sequence[TriangleMesh],
        surface: SurfaceSamples | None,
        figures: dict[str, Any],
    ) -> TriangleMesh:
        """Return one mesh of some regions, with at most ``target`` triangles each.

        Fillings of holes come on top.

        Args:
            path: File of the mesh, for messages.
            surface: Points that vertices snap to; None for none.
            figures: For the record of the mesh; those of its holes are added.
        """
        options = self._options
        splits = options.triangle_pixels > 0 and options.mesh_error is None
        with self._console.waiting(f"{path.name}: {target:,} triangles"):
            box = self._boxes[0] if options.is_fused else None
            decimate = partial(self._backend.decimate, n_faces=target // 2 if splits else target)
            if options.mesh_error is not None:
                decimate = partial(
                    decimated_to_error,
                    pixels=options.mesh_error,
                    cameras=self._cameras,
                    n_faces=target,
                    decimate=self._backend.decimate,
                )
            mesh = finish_mesh(meshes, decimate, surface, box)
        if options.watertight:
            # Decimation tears a few edges open, and Poisson ends at the borders of its cube.
            mesh = triangle_mesh.with_holes_filled(mesh)
            mesh = triangle_mesh.with_vertex_normals(mesh)
        elif options.remove_unseen:
            mesh = self._without_unseen(mesh)
        # After decimation, which drops attributes of vertices, and after what tears holes open.
        if options.fills_holes:
            mesh = self._with_holes_filled(mesh, figures)
        if splits:
            covered = self._covered_pixels(mesh)
            mesh = split_to_pixels(mesh, covered, options.triangle_pixels, target * len(meshes))
            mesh = triangle_mesh.with_vertex_normals(mesh)
        if mesh.n_faces == 0:
            raise UserError(
                f"{path.name}: no triangle is left after the clean-up; use more --surface_points "
                "or a larger --decimation_target"
            )
        return mesh

    def _with_holes_filled(self, mesh: TriangleMesh, figures: dict[str, Any]) -> TriangleMesh:
        """Fill the holes that photographs allow; add their counts to the record."""
        inner_voxel = self._voxel_sizes["foreground"]
        evidence = ViewEvidence(
            cameras=self._cameras,
            hull=self._hull,
            renderer=self._renderer,
            box=self._boxes[0],
            inner_voxel=inner_voxel,
            outer_voxel=self._voxel_sizes.get("background", inner_voxel),
            device=self._options.compute.device,
        )
        is_object = self._hull is not None
        with self._console.waiting("holes"):
            mesh, counts = fill_holes(mesh, evidence.judge, is_object=is_object, box=self._boxes[0])
        figures.update(counts.figures())
        self._console.info(str(counts))
        return mesh

    def _write(
        self, path: Path, identity: Recipe, mesh: TriangleMesh, figures: Mapping[str, Any]
    ) -> None:
        """Write a mesh and its record."""
        usage = memory_usage(self._options.compute.device)
        solver_bytes = self._largest_solver if usage.kind == "RSS" else 0
        result = {
            **figures,
            "seconds": round(time.monotonic() - self._start, 2),
            "peak_bytes": max(usage.peak, solver_bytes),
            "backend": self._backend.name,
            "vertices": mesh.n_vertices,
            "faces": mesh.n_faces,
            **asdict(triangle_mesh.topology(mesh)),
        }
        with identity.publish([path], lambda: result) as temporary:
            triangle_mesh.write_mesh_ply(temporary[path], mesh)
        self._console.info(f"{mesh.n_vertices:,} vertices, {mesh.n_faces:,} triangles: {path}")
