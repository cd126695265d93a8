# SPDX-License-Identifier: Apache-2.0
"""Steps of the mesh stage that whole captures and blocks of captures share.

A step takes the :class:`Extraction` and the mesh of the step before, and returns a mesh with the
figures that go into its record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh.fusion import observed_region
from sugar_extractors.mesh.holes.hole_evidence import ViewEvidence
from sugar_extractors.mesh.holes.hole_filling import fill_holes
from sugar_extractors.mesh.holes.loose_pieces import without_loose_pieces
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.meshing_backends import MeshingBackend
from sugar_extractors.mesh.refinement.compared_views import Photograph
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import FusedViews, Renderer
from sugar_scene.regions import Box, Region
from sugar_scene.subdivision import covered_pixels, split_to_pixels, visible_part
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.memory import memory_usage
from sugar_utils.recipe import Recipe

Figures = dict[str, Any]


@dataclass(frozen=True)
class Extraction:
    """What all steps of one extraction read."""

    options: MeshOptions
    console: Console
    scene: Scene
    region: Region
    views: FusedViews
    backend: MeshingBackend
    photograph: Photograph | None  # the photographs that move vertices; None for none
    start: float  # of :func:`time.monotonic`, for the seconds in the records


class Meshed(NamedTuple):
    """A mesh after a step."""

    mesh: TriangleMesh
    figures: Figures  # for the record of the mesh


def observed_space(extraction: Extraction, box: Box) -> observed_region.ObservedRegion | None:
    """Return the space near the points of the reconstruction in a box; None for anywhere."""
    margin = extraction.options.tsdf.margin
    scene = extraction.scene
    if margin is None:
        return None
    return observed_region.observed_region(scene.observations, box, margin * scene.extent)


def without_bare_border(
    extraction: Extraction, mesh: TriangleMesh, render: Renderer, box: Box, voxel: float
) -> TriangleMesh:
    """Cut surface without texture off the borders of a mesh, outside of the points in a box.

    Args:
        render: Depth of the fused views.
        voxel: Side of the voxels that the mesh was fused on, world units.
    """
    config = extraction.options.tsdf
    points_region = observed_region.observed_region(extraction.scene.observations, box, 0.0)
    cameras = extraction.views.cameras
    if points_region is None or mesh.n_faces == 0 or not cameras:
        return mesh
    reach = config.truncation * voxel
    cut = observed_region.without_bare_border(
        mesh, points_region, render, cameras, reach, config.min_component
    )
    n_cut = mesh.n_faces - cut.n_faces
    extraction.console.info(f"{n_cut:,} triangles without texture cut off at borders")
    return cut


def without_unseen(extraction: Extraction, mesh: TriangleMesh) -> TriangleMesh:
    """Return the triangles that some training view sees, and those that touch them."""
    visible = visible_part(mesh, _covered_pixels(extraction, mesh))
    n_removed = mesh.n_faces - visible.n_faces
    extraction.console.info(f"{n_removed:,} triangles that no view sees removed")
    return visible


def _covered_pixels(extraction: Extraction, mesh: TriangleMesh) -> np.ndarray:
    cameras = extraction.scene.train_cameras
    return covered_pixels(mesh, cameras, extraction.views.device)


def with_holes_filled(
    extraction: Extraction, mesh: TriangleMesh, voxels: Mapping[str, float]
) -> Meshed:
    """Fill the holes that images allow, but none that continues in another region.

    Args:
        voxels: Side of the voxels of ``foreground`` and, if it is meshed, ``background``, world
            units.
    """
    views = extraction.views
    region = extraction.region
    inner_voxel = voxels["foreground"]
    evidence = ViewEvidence(
        views=views,
        box=region.box,
        inner_voxel=inner_voxel,
        outer_voxel=voxels.get("background", inner_voxel),
        mesh=mesh,
    )
    with extraction.console.waiting("holes"):
        mesh, counts = fill_holes(
            mesh, evidence.judge, is_object=views.hull is not None, region=region
        )
    extraction.console.info(str(counts))
    return Meshed(mesh, counts.figures())


def closed(extraction: Extraction, mesh: TriangleMesh, voxels: Mapping[str, float]) -> Meshed:
    """Close a decimated mesh everywhere, or remove what is unseen or loose and fill small holes.

    Args:
        voxels: As of :func:`with_holes_filled`.
    """
    options = extraction.options
    if options.watertight:
        # Decimation tears a few edges open, and Poisson ends at the borders of its cube.
        mesh = triangle_mesh.with_holes_filled(mesh)
        return Meshed(triangle_mesh.with_vertex_normals(mesh), {})
    if options.remove_unseen:
        mesh = without_unseen(extraction, mesh)
    if options.is_fused:
        n_before = mesh.n_faces
        continues = extraction.region.shared(mesh.vertices)
        # Before holes are filled: a piece that views see in a hole would contradict it.
        mesh = without_loose_pieces(mesh, extraction.views.cameras, continues)
        extraction.console.info(f"{n_before - mesh.n_faces:,} triangles of loose pieces removed")
    # After decimation, which drops attributes of vertices, and after what tears holes open.
    if options.fills_holes:
        return with_holes_filled(extraction, mesh, voxels)
    return Meshed(mesh, {})


def split(extraction: Extraction, mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
    """Split triangles that cover many pixels, to ``n_faces`` at most."""
    covered = _covered_pixels(extraction, mesh)
    mesh = split_to_pixels(mesh, covered, extraction.options.triangle_pixels, n_faces)
    return triangle_mesh.with_vertex_normals(mesh)


def write(
    extraction: Extraction, path: Path, recipe: Recipe, mesh: TriangleMesh, figures: Figures
) -> None:
    """Write a mesh and its record.

    Args:
        figures: Of all steps; ``peak_bytes`` are those of other processes, if there were any.
    """
    usage = memory_usage(extraction.views.device)
    solver_bytes = figures.get("peak_bytes", 0) if usage.kind == "RSS" else 0
    result = {
        **figures,
        "seconds": round(time.monotonic() - extraction.start, 2),
        "peak_bytes": max(usage.peak, solver_bytes),
        "backend": extraction.backend.name,
        "vertices": mesh.n_vertices,
        "faces": mesh.n_faces,
        **asdict(triangle_mesh.topology(mesh)),
    }
    with recipe.publish([path], lambda: result) as temporary:
        triangle_mesh.write_mesh_ply(temporary[path], mesh)
    extraction.console.info(f"{mesh.n_vertices:,} vertices, {mesh.n_faces:,} triangles: {path}")
