# SPDX-License-Identifier: Apache-2.0
"""The folder of results: files of a run under plain names, upright and centred.

The tree of the original stays beside it, in the world of the capture::

    mesh.obj, mesh.mtl, mesh.png    textured mesh (mesh.ply with vertex colours where none was made)
    mesh.glb                        the same in one file
    splats.ply                      Gaussians
    transform.json                  the matrix from the scene to these files, and back
    photographs.json                cameras of the photographs, in the world of these files
    report.html                     the report, written by the pipeline
    index.html                      mesh and Gaussians in one page, likewise
    mesh_00.png ..., tiles/         of runs in blocks: a picture for each block, and 3D Tiles
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud, moved_points
from gaussian_splatting.data.world_offset import MEANING
from gaussian_splatting.engine.reporting.run_report import REPORT_FILE
from gaussian_splatting.formats.placement import (
    MESH,
    SPLATS,
    TILES,
    TRANSFORM,
    Placement,
    glb_matrix,
)
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.outputs.result_photographs import PHOTOGRAPHS, write_photographs
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.texture.placed_copy import placement_in, write_moved_mesh
from sugar_scene.mesh_files import textured_mesh_io
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.triangle_mesh import TriangleMesh, write_mesh_ply
from sugar_trainers.naming import INDEX
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, file_digest
from sugar_utils.recipe import Recipe

TILE_FOLDER = "tiles"
PAGES = f"{MESH}_[0-9][0-9]*.png"  # pictures of the blocks
TILE_FILES = (TILES, "tile_*.glb", "overview*.glb")


@dataclass(frozen=True)
class FinalResults:
    """Results that a run hands out; None where it made none."""

    # The textured OBJ, else the coarse mesh, a PLY.
    mesh: Path | None
    # The file that the Gaussians were read from, and what reads them.
    splats: Path | None
    read_splats: Callable[[], GaussianCloud]
    glb: bool = True  # whether a textured mesh is written as GLB, too
    lit: bool = False  # whether viewers light that GLB
    checkpoint: Path | None = None  # vanilla checkpoint whose cameras they were trained with

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the mesh and the Gaussians that the results are made from."""
        paths = {"mesh": self.mesh, "splats": self.splats}
        return {name: file_digest(path) for name, path in paths.items() if path is not None}


def write_result_folder(
    folder: Path, results: FinalResults, scene: Scene, options: PlacementOptions
) -> list[Path]:
    """Write mesh, Gaussians and the matrix, unless they are there; return the files.

    Args:
        options: Where the copies stand; upright where they do not say.
    """
    check_writable(folder)
    if options.orient is None:
        options = replace(options, orient="up")
    upright = options.orient == "up"
    files = _files(folder, results)
    note_file = folder / TRANSFORM
    recipe = Recipe({"placement": asdict(options), "lit": results.lit}, results.sources)
    if recipe.is_current(note_file, files) and _has_placement(folder):
        return files
    remove_results(folder)
    cloud = None if results.splats is None else results.read_splats()
    mesh = _read_mesh(results)
    vertices = _places(mesh, cloud)
    placement = placement_in(scene, vertices, options)
    matrix = placement.matrix
    if isinstance(mesh, TexturedMesh):
        moved = moved_points(vertices, matrix)
        target = folder / f"{MESH}.obj"
        write_moved_mesh(target, mesh, moved, glb=results.glb, upright=upright, lit=results.lit)
    elif mesh is not None:
        moved = moved_points(vertices, matrix)
        # Normals are computed anew.
        write_mesh_ply(folder / f"{MESH}.ply", replace(mesh, vertices=moved, normals=None))
    if cloud is not None:
        write_gaussian_ply(folder / SPLATS, moved_cloud(cloud, matrix))
    write_photographs(folder, scene.calibrated_cameras, matrix)
    origin = replace(placement.origin, model=results.splats, checkpoint=results.checkpoint)
    write_transform(folder, replace(placement, origin=origin), recipe)
    return files


def remove_results(folder: Path) -> None:
    """Remove the files of earlier runs of any kind from a folder of results.

    The log of the run stays, and so do files of others.

    Raises:
        UserError: A folder has the name of such a file; nothing is removed then.
    """
    # Without the first one the files of two runs are not taken for one.
    files = [folder / TRANSFORM]
    files += textured_mesh_io.mesh_files(folder / f"{MESH}.obj", glb=True)
    files += [folder / name for name in (f"{MESH}.ply", SPLATS, PHOTOGRAPHS, INDEX, REPORT_FILE)]
    files += folder.glob(PAGES)
    tile_folder = folder / TILE_FOLDER
    for pattern in TILE_FILES:
        files += tile_folder.glob(pattern)
    for path in files:
        if path.is_dir():
            raise UserError(f"{path}: is a folder; move it away")
    for path in files:
        path.unlink(missing_ok=True)
    if tile_folder.is_dir() and not any(tile_folder.iterdir()):
        tile_folder.rmdir()


def write_transform(folder: Path, placement: Placement, recipe: Recipe | None = None) -> Path:
    """Write the placement of the files of a folder, and their inputs; return the record's path."""
    path = folder / TRANSFORM
    values = {
        **placement.record(folder),
        "matrix_to_scene": np.linalg.inv(placement.matrix).tolist(),
        "glb_matrix": glb_matrix(placement).tolist(),
        "glb_meaning": "glb_matrix: of mesh.glb; the coarse, refined and vanilla folders are in "
        "the world of the scene",
        "world_offset_meaning": MEANING,
    }
    (recipe or Recipe()).write(path, **values)
    return path


def _has_placement(folder: Path) -> bool:
    with contextlib.suppress(UserError):
        return Placement.of(folder).is_recorded
    return False


def _files(folder: Path, results: FinalResults) -> list[Path]:
    """The files that will be there, those for people first."""
    files = []
    if _is_textured(results):
        files += textured_mesh_io.mesh_files(folder / f"{MESH}.obj", results.glb)[::-1]
    elif results.mesh is not None:
        files.append(folder / f"{MESH}.ply")
    if results.splats is not None:
        files.append(folder / SPLATS)
    return [*files, folder / PHOTOGRAPHS, folder / TRANSFORM]


def _is_textured(results: FinalResults) -> bool:
    return results.mesh is not None and results.mesh.suffix.lower() == ".obj"


def _read_mesh(results: FinalResults) -> TexturedMesh | TriangleMesh | None:
    if results.mesh is None:
        return None
    if _is_textured(results):
        return textured_mesh_io.read_textured_mesh(results.mesh)
    return read_any_mesh(results.mesh)


def _places(mesh: TexturedMesh | TriangleMesh | None, cloud: GaussianCloud | None) -> np.ndarray:
    """Points that say where the results stand. (N, 3) float64"""
    if isinstance(mesh, TexturedMesh):
        return mesh.vertices.double().numpy()
    if mesh is not None:
        return mesh.vertices.astype(np.float64)
    return np.zeros((0, 3)) if cloud is None else cloud.means.double().numpy()
