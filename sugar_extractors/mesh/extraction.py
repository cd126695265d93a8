# SPDX-License-Identifier: Apache-2.0
"""The mesh stage: from a coarse model to mesh files.

::

    load ─► surfaces ─► cut ─► refine ─► decimate ─► close ─► split ─► write

The steps after ``refine`` are in ``mesh_steps.py`` and ``mesh_finishing.py``; the meshes of blocks
of a capture are made by the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.data.images import ImageStore, shared_or_own_store
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh import mesh_steps
from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.loading import Loaded, load
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG, MeshOptions
from sugar_extractors.mesh.mesh_finishing import decimated_to_error, finish_mesh
from sugar_extractors.mesh.mesh_steps import Extraction, Meshed
from sugar_extractors.mesh.surfaces import (
    Surfaces,
    cut,
    one_closed_surface,
    refine,
    surfaces,
)
from sugar_extractors.photographs import photo_source
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe, alone_with


def extract_coarse_mesh(
    options: MeshOptions, console: Console | None = None, images: ImageStore | None = None
) -> list[Path]:
    """Extract meshes of all levels and decimation targets, each with a ``.json`` file beside it.

    Meshes that exist with the same settings are not made again.

    Args:
        images: Decoded photographs of other stages.

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
    options.compute.report(console.note)
    checkpoint, scene = load_views(options, console.note, seed=options.random_seed)
    poisson = options.poisson.resolved(any(c.shows_object for c in scene.train_cameras))
    options = replace(options, poisson=poisson)
    if options.refines_vertices and not _has_photographs(scene):
        console.note("photographs are missing, so vertices stay where the depth is")
        options = replace(options, photometric_refinement="none")
    inputs = {
        **scene_inputs(scene, photographs=options.refines_vertices, tracks=options.reads_tracks),
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
            with shared_or_own_store(images, white_background=False) as store:
                photograph = None
                if options.refines_vertices:
                    photograph = photo_source(store, options.compute.device, exposures={})
                _extract(load(options, console, checkpoint, scene, photograph), missing)
    return options.mesh_paths


def _has_photographs(scene: Scene) -> bool:
    paths = [camera.image_path for camera in scene.train_cameras]
    return all(path is not None and path.is_file() for path in paths)


def _extract(loaded: Loaded, jobs: Mapping[tuple[float, int], Recipe]) -> None:
    """Extract a mesh for each pair of a level and a number of triangles."""
    extraction = loaded.extraction
    options = extraction.options
    levels = sorted({level for level, _ in jobs})
    for level, of_level in surfaces(loaded, levels):
        of_level = refine(extraction, cut(extraction, of_level))
        if options.watertight and options.is_fused:
            of_level = one_closed_surface(extraction, of_level)
        for (job_level, target), recipe in jobs.items():
            if job_level == level:
                path = options.mesh_path(level, target)
                mesh, figures = _finished(extraction, of_level, path.name, target)
                mesh_steps.write(extraction, path, recipe, mesh, figures)


def _finished(extraction: Extraction, regions: Surfaces, name: str, target: int) -> Meshed:
    """Return one mesh of some regions, with at most ``target`` triangles each.

    Fillings of holes come on top.

    Args:
        name: Of the file of the mesh, for messages.
    """
    options = extraction.options
    splits = options.triangle_pixels > 0 and options.mesh_error is None
    box = extraction.region.box if options.is_fused else None
    with extraction.console.waiting(f"{name}: {target:,} triangles"):
        parts = _decimated(extraction, regions, target // 2 if splits else target)
        mesh = finish_mesh(parts, regions.points, box)
    mesh, figures = mesh_steps.closed(extraction, mesh, regions.voxels)
    if splits:
        mesh = mesh_steps.split(extraction, mesh, target * len(regions.meshes))
    if mesh.n_faces == 0:
        raise UserError(
            f"{name}: no triangle is left after the clean-up; use more --surface_points "
            "or a larger --decimation_target"
        )
    return Meshed(mesh, {**regions.figures, **figures})


def _decimated(extraction: Extraction, regions: Surfaces, n_faces: int) -> list[TriangleMesh]:
    """Decimate each region to so many triangles, or fewer where an error in pixels is allowed."""
    pixels = extraction.options.mesh_error
    if pixels is not None:
        cameras = extraction.views.cameras
        return [decimated_to_error(mesh, pixels, cameras, n_faces) for mesh in regions.meshes]
    weights = regions.weights or [None] * len(regions.meshes)
    pairs = zip(regions.meshes, weights, strict=True)
    return [decimated(mesh, n_faces, of_mesh) for mesh, of_mesh in pairs]
