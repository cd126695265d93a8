# SPDX-License-Identifier: Apache-2.0
"""Surfaces of foreground and background, before they are decimated and become one mesh."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from gaussian_splatting.core.subsets import about, box_of_most
from sugar_extractors.mesh import level_sets, seams
from sugar_extractors.mesh.fusion.tetrahedra import TetrahedraFusion
from sugar_extractors.mesh.fusion.tsdf import FusedRegion, Fusion
from sugar_extractors.mesh.level_sets import SurfaceSamples
from sugar_extractors.mesh.loading import Loaded
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.mesh_steps import (
    Extraction,
    Figures,
    observed_space,
    without_bare_border,
)
from sugar_extractors.mesh.meshing_backends import PoissonConfig
from sugar_extractors.mesh.poisson_regions import MIN_POINTS, reconstruct_region
from sugar_extractors.mesh.refinement.compared_views import ComparedViews
from sugar_extractors.mesh.refinement.noise import error_weights, without_noise
from sugar_extractors.mesh.refinement.photometric_refinement import REDUCTIONS, refined_mesh
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import Renderer
from sugar_scene.regions import Box
from sugar_scene.reprojection import NeighborViews
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError
from sugar_utils.memory import format_bytes, memory_usage

MIN_BACKGROUND_SHARE = 0.001  # of the surface points: Poisson makes large blobs of a few


class Surfaces(NamedTuple):
    """The surfaces of the regions that have one, the foreground first."""

    meshes: list[TriangleMesh]
    figures: Figures  # for the records of meshes; ``peak_bytes`` are those of other processes
    points: SurfaceSamples | None = None  # that vertices snap to; None for none
    voxels: dict[str, float] = {}  # side of the voxels of fused regions, world units
    # Of squared distances from the vertices of each mesh, in decimation; None: all are equal. (V,)
    weights: list[np.ndarray] | None = None


class _Solved(NamedTuple):
    """A surface that another process reconstructed."""

    mesh: TriangleMesh
    peak_bytes: int  # of this process and the other one


def surfaces(loaded: Loaded, levels: Sequence[float]) -> Iterator[tuple[float, Surfaces]]:
    """Yield the surfaces of each level of the density; fused ones have a single level.

    Raises:
        UserError: There is no surface.
    """
    options = loaded.extraction.options
    if options.is_fused:
        for level in levels:
            yield level, _fused_surfaces(loaded)
        return
    samples = _sampled(loaded, levels)
    for level in levels:
        yield level, _poisson_surfaces(loaded, samples.pop(0))


def cut(extraction: Extraction, before: Surfaces) -> Surfaces:
    """Cut off triangles outside of the masks.

    Raises:
        UserError: Nothing is left.
    """
    hull = extraction.views.hull
    if hull is None:
        return before
    remaining = []
    for mesh in before.meshes:
        vertices = torch.from_numpy(mesh.vertices).to(extraction.views.device)
        inside = hull.contains(vertices).cpu().numpy()
        part = triangle_mesh.with_corners_in(replace(mesh, normals=None), inside)
        if part.n_faces:
            remaining.append(part)
    n_before = sum(mesh.n_faces for mesh in before.meshes)
    n_after = sum(mesh.n_faces for mesh in remaining)
    extraction.console.info(f"{n_before - n_after:,} triangles outside of the masks cut off")
    if not remaining:
        raise UserError(
            "the whole mesh lies outside of the masks; check that they belong to these "
            "photographs, or pass --mask_mode ignore or --masks none"
        )
    return before._replace(meshes=remaining)


def refine(extraction: Extraction, before: Surfaces) -> Surfaces:
    """Move the vertices of fused depth until the photographs agree, and smooth what they leave."""
    photograph = extraction.photograph
    views = extraction.views
    if photograph is None or not views.cameras:
        return before
    scene = extraction.scene
    neighbors = NeighborViews(views.cameras, scene.extent, observations=scene.observations)
    compared = ComparedViews(views.cameras, neighbors, photograph, views.device)
    start = time.monotonic()
    scores = []
    with extraction.console.progress("photographs", 1, len(REDUCTIONS)) as progress:

        def on_step(step: int, score: float) -> None:
            scores.append(score)
            progress.update(step + 1, fields={"correlation": f"{score:.3f}"})

        # All regions in one: each hides parts of the others.
        merged = triangle_mesh.merge_meshes(before.meshes)
        refined = refined_mesh(merged, compared, on_step)
        vertices = without_noise(*refined).vertices
    ends = np.cumsum([mesh.n_vertices for mesh in before.meshes])[:-1]
    moved = np.split(vertices, ends)
    pairs = zip(before.meshes, moved, strict=True)
    parts = [replace(mesh, vertices=places, normals=None) for mesh, places in pairs]
    weights = np.split(error_weights(refined.mesh, refined.certainty), ends)
    figures = {
        **before.figures,
        "correlations": [round(score, 4) for score in scores],
        "refinement_seconds": round(time.monotonic() - start, 2),
    }
    return before._replace(meshes=parts, figures=figures, weights=weights)


def one_closed_surface(extraction: Extraction, fused: Surfaces) -> Surfaces:
    """Return one closed surface of the fused depth; masks were applied before.

    Raises:
        UserError: Too few points were fused.
    """
    mesh = triangle_mesh.merge_meshes(fused.meshes)
    normals = triangle_mesh.vertex_normals(mesh)
    samples = SurfaceSamples(
        mesh.vertices.astype(np.float32), normals.astype(np.float32), mesh.colors
    )
    if len(samples) < MIN_POINTS:
        raise UserError(
            f"only {len(samples)} points were fused, too few to close a surface through them; "
            "train the model longer"
        )
    start = time.monotonic()
    poisson = _poisson_config(extraction, samples)
    solved = _solved(extraction, "closed surface: Poisson", samples, poisson)
    seconds = round(time.monotonic() - start, 2)
    figures = {**fused.figures, "closing_seconds": seconds, "peak_bytes": solved.peak_bytes}
    return fused._replace(meshes=[solved.mesh], figures=figures, weights=None)


def _sampled(loaded: Loaded, levels: Sequence[float]) -> list[SurfaceSamples]:
    """Return surface points of each level."""
    extraction = loaded.extraction
    options = extraction.options
    cameras = extraction.views.cameras
    with extraction.console.progress("surface points", 1, len(cameras)) as progress:
        return level_sets.collect_surface_samples(
            loaded.model,
            cameras,
            levels,
            target=options.n_surface_points,
            hull=extraction.views.hull,
            seed=options.random_seed,
            on_view=lambda done, n: progress.update(done, fields={"points": f"{n:,}"}),
        )


def _poisson_surfaces(loaded: Loaded, samples: SurfaceSamples) -> Surfaces:
    """Reconstruct foreground and background of surface points."""
    extraction = loaded.extraction
    options = extraction.options
    console = extraction.console
    if len(samples) < MIN_POINTS:
        raise UserError(
            f"only {len(samples)} surface points were found in all views: the density "
            "crosses no level there; lower --surface_level or train the model longer"
        )
    inside = extraction.region.box.contains(samples.points)
    parts = {"foreground": inside}
    if options.background_mesh:
        parts["background"] = loaded.background.contains(samples.points) & ~inside
    figures: Figures = {"surface_points": len(samples)}
    meshes = []
    peak_bytes = 0
    for name, mask in parts.items():
        n = int(mask.sum())
        figures[f"{name}_points"] = n
        min_share = MIN_BACKGROUND_SHARE if name == "background" else 0.0
        if n < max(MIN_POINTS, min_share * len(samples)):
            console.info(_too_few(options, name, n, samples.points))
            continue
        start = time.monotonic()
        part = samples.select(mask)
        poisson = _poisson_config(extraction, part)
        depth = poisson.poisson_depth
        figures[f"{name}_depth"] = depth
        console.info(f"{name}: Poisson of {n:,} points, octree depth {depth}")
        mesh, n_bytes = _solved(extraction, f"{name}: Poisson", part, poisson)
        peak_bytes = max(peak_bytes, n_bytes)
        seconds = round(time.monotonic() - start, 2)
        figures[f"{name}_seconds"] = seconds
        console.info(f"{name}: {mesh.n_faces:,} triangles before decimation ({seconds:.1f} s)")
        meshes.append(mesh)
    if not any(mesh.n_faces for mesh in meshes):
        raise UserError(
            f"no surface in the foreground or background box; the surface points lie in "
            f"{_span(samples.points)}: set --bboxmin and --bboxmax"
        )
    figures["peak_bytes"] = peak_bytes
    # Vertices that land on one point would tear a closed surface open.
    snaps = options.project_mesh_on_surface_points and not options.watertight
    return Surfaces(meshes, figures, samples if snaps else None)


def _poisson_config(extraction: Extraction, samples: SurfaceSamples) -> PoissonConfig:
    """Return the settings with their depth; closed surfaces are cut nowhere."""
    options = extraction.options
    config = options.poisson.with_depth(samples.points, extraction.views.cameras)
    if not options.watertight:
        return config
    return replace(config, vertices_density_quantile=0.0)


def _solved(
    extraction: Extraction, name: str, samples: SurfaceSamples, poisson: PoissonConfig
) -> _Solved:
    """Reconstruct a region; meanwhile the console shows elapsed time and memory."""
    own_bytes = memory_usage("cpu").current
    peak_bytes = own_bytes
    with extraction.console.waiting(name) as show:

        def watch(n_bytes: int) -> None:
            nonlocal peak_bytes
            peak_bytes = max(peak_bytes, own_bytes + n_bytes)
            show({"memory": format_bytes(n_bytes)})

        mesh = reconstruct_region(samples, poisson, extraction.backend, watch)
    return _Solved(mesh, peak_bytes)


def _too_few(options: MeshOptions, name: str, n: int, points: np.ndarray) -> str:
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
            f"points; they lie in {_span(points)} (world coordinates{moved})"
        )
    return f"{name}: only {n} of {len(points):,} surface points, left out"


def _span(points: np.ndarray) -> str:
    """Return the box of the middle 98 % of points, (P, 3), on each axis, as text."""
    return str(Box.of_corners(*box_of_most(about(points, 100_000), 0.01)))


def _fused_surfaces(loaded: Loaded) -> Surfaces:
    """Fuse foreground and background."""
    extraction = loaded.extraction
    options = extraction.options
    inner = extraction.region.box
    parts = {"foreground": inner}
    if options.background_mesh and not options.watertight:
        parts["background"] = loaded.background
    render = extraction.views.renderer()
    figures: Figures = {}
    voxels = {}
    meshes = []
    for name, box in parts.items():
        start = time.monotonic()
        fused = _fused(loaded, render, box, None if name == "foreground" else inner)
        voxels[name] = fused.voxel_size
        figures[f"{name}_voxel"] = fused.voxel_size
        counted = "corners" if options.mesh_extractor == "tetrahedra" else "voxels"
        figures[f"{name}_{counted}"] = fused.n_voxels
        figures[f"{name}_seconds"] = round(time.monotonic() - start, 2)
        mesh = fused.mesh
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
            f"no surface in the foreground or background box {loaded.background}; set --bboxmin "
            "and --bboxmax"
        )
    return Surfaces(meshes, figures, voxels=voxels)


def _fused(loaded: Loaded, render: Renderer, box: Box, excluded: Box | None) -> FusedRegion:
    """Return the surface within a box, near the points of the reconstruction if asked for.

    Args:
        render: Depth of views.
        box: Where the surface is.
        excluded: Part of it that another mesh covers, which need not be right; None for none.
    """
    extraction = loaded.extraction
    options = extraction.options
    views = extraction.views
    region = observed_space(extraction, box)
    fusion = Fusion(render, views.cameras, box, options.tsdf, extraction.console)
    if options.mesh_extractor == "tetrahedra":
        gaussians = loaded.cloud.detached().activate()
        fused = TetrahedraFusion(fusion, gaussians, excluded).surface(region)
    else:
        # The grid of the background is too large for smaller voxels.
        thin_parts = options.tsdf.adds_thin_parts and excluded is None
        fused = fusion.surface(region, thin_parts=thin_parts)
    # Masks show where an object ends.
    if region is None or views.hull is not None:
        return fused
    mesh = without_bare_border(extraction, fused.mesh, render, loaded.background, fused.voxel_size)
    return replace(fused, mesh=mesh)
