# SPDX-License-Identifier: Apache-2.0
"""The mesh stage: from a coarse model to mesh files.

::

    load ─► surfaces ─► cut ─► decimate ─► close ─► split ─► write

The steps after ``cut`` are in ``mesh_steps.py`` and ``mesh_finishing.py``; the meshes of blocks of
a capture are made by the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gaussian_splatting.engine.run_identity import scene_inputs
from sugar_extractors.mesh import mesh_steps
from sugar_extractors.mesh.loading import Loaded, load
from sugar_extractors.mesh.mesh_config import OUTPUT_FLAG, MeshOptions
from sugar_extractors.mesh.mesh_finishing import decimated_to_error, finish_mesh
from sugar_extractors.mesh.mesh_steps import Extraction, Meshed
from sugar_extractors.mesh.surfaces import Surfaces, cut, one_closed_surface, surfaces
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe, alone_with


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
            _extract(load(options, console, checkpoint, scene), missing)
    return options.mesh_paths


def _extract(loaded: Loaded, jobs: Mapping[tuple[float, int], Recipe]) -> None:
    """Extract a mesh for each pair of a level and a number of triangles."""
    extraction = loaded.extraction
    options = extraction.options
    levels = sorted({level for level, _ in jobs})
    for level, of_level in surfaces(loaded, levels):
        of_level = cut(extraction, of_level)
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
    decimate = partial(extraction.backend.decimate, n_faces=target // 2 if splits else target)
    if options.mesh_error is not None:
        decimate = partial(
            decimated_to_error,
            pixels=options.mesh_error,
            cameras=extraction.views.cameras,
            n_faces=target,
            decimate=extraction.backend.decimate,
        )
    box = extraction.region.box if options.is_fused else None
    with extraction.console.waiting(f"{name}: {target:,} triangles"):
        mesh = finish_mesh(regions.meshes, decimate, regions.points, box)
    mesh, figures = mesh_steps.closed(extraction, mesh, regions.voxels)
    if splits:
        mesh = mesh_steps.split(extraction, mesh, target * len(regions.meshes))
    if mesh.n_faces == 0:
        raise UserError(
            f"{name}: no triangle is left after the clean-up; use more --surface_points "
            "or a larger --decimation_target"
        )
    return Meshed(mesh, {**regions.figures, **figures})
