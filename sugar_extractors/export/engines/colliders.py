# SPDX-License-Identifier: Apache-2.0
"""Shapes to collide with: convex pieces of a mesh by CoACD, or one closed mesh."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import numpy as np

from gaussian_splatting.core.subsets import longest_side
from sugar_extractors.export.engines.convex_process import INPUT, OUTPUT
from sugar_extractors.export.engines.engine_options import EngineOptions
from sugar_extractors.export_contents import Collider, CollisionShape
from sugar_extractors.mesh.decimation import decimated
from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.printable_meshes import with_all_holes_closed
from sugar_scene.triangle_mesh import TriangleMesh, open_edge_share
from sugar_utils.errors import Notify, UserError
from sugar_utils.libraries import install_advice, load_package, run_alone

_PROCESS = "sugar_extractors.export.engines.convex_process"
_PACKAGE = "coacd"
_CONCAVITY = 0.08  # largest of a piece, of the size of the mesh
_PIECE_VERTICES = 64  # 124 triangles; engines take 255
_SMALL_PART = 0.01  # of all triangles, below which a part is nothing to collide with


def check_collision(options: EngineOptions) -> None:
    """Raise a UserError where the package for convex pieces is needed and missing."""
    if options.collision == "convex":
        load_package("--collision convex", _PACKAGE, _PACKAGE, instead="pass --collision mesh")


def _has_package() -> bool:
    with contextlib.suppress(UserError):
        check_collision(EngineOptions(collision="convex"))
        return True
    return False


def collider_of(mesh: TriangleMesh, options: EngineOptions, notify: Notify) -> Collider:
    """Return the shapes to collide with of a mesh, and report them.

    Raises:
        UserError: No triangles are left, or CoACD failed.
    """
    reduced = _reduced(mesh, options.collision_triangles)
    convex = options.collision == "convex"
    if options.collision == "auto":
        convex = _has_package()
        if not convex:
            notify(
                "note: collision is one mesh, and engines move convex shapes only; for convex "
                f"pieces {install_advice(_PACKAGE)}"
            )
    if convex:
        collider = Collider(_convex_pieces(reduced, options.collision_pieces), convex=True)
        notify(f"collision: {len(collider.shapes)} convex pieces, {collider.n_faces:,} triangles")
        return collider
    closed = with_all_holes_closed(reduced)
    shape = CollisionShape(closed.vertices, closed.faces)
    state = "closed"
    open_share = open_edge_share(closed)
    if open_share:
        state = f"{open_share:.2%} of its edges are open"
    notify(f"collision: a mesh of {closed.n_faces:,} triangles, {state}")
    return Collider((shape,), convex=False)


def _reduced(mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
    """Return a mesh of so many triangles, without its small parts."""
    joined = triangle_mesh.clean_mesh(mesh)
    cleaned = triangle_mesh.clean_mesh(decimated(joined, n_faces))
    least = max(1, round(_SMALL_PART * cleaned.n_faces))
    reduced = triangle_mesh.without_small_components(cleaned, least)
    if reduced.n_faces == 0:
        raise UserError(f"no triangles are left at --collision_triangles {n_faces}; raise it")
    return reduced


def _convex_pieces(mesh: TriangleMesh, most: int) -> tuple[CollisionShape, ...]:
    """Cut a mesh into convex pieces, in a subprocess, which bad geometry can crash."""
    settings = {
        "threshold": _CONCAVITY,
        "max_convex_hull": most,
        "decimate": True,
        "max_ch_vertex": _PIECE_VERTICES,
        "resolution": 1000,
        "mcts_iterations": 60,
        "seed": 0,
    }
    # The package works in a cube of its own, whose place and size cost digits of float32.
    middle = (mesh.vertices.min(axis=0) + mesh.vertices.max(axis=0)) / 2
    size = max(longest_side(mesh.vertices), 1e-12)
    with tempfile.TemporaryDirectory() as folder:
        places = (mesh.vertices - middle) / size
        np.savez(Path(folder) / INPUT, vertices=places, faces=mesh.faces)
        try:
            run_alone(_PROCESS, [folder, json.dumps(settings)])
        except UserError as error:
            reason = str(error).split(": ", 1)[-1]
            raise UserError(
                f"CoACD cannot cut the mesh into convex pieces ({reason}); pass --collision mesh"
            ) from error
        with np.load(Path(folder) / OUTPUT) as arrays:
            n_pieces = int(arrays["count"])
            shapes = []
            for number in range(n_pieces):
                vertices = arrays[f"vertices_{number}"] * size + middle
                shapes.append(CollisionShape(vertices, arrays[f"faces_{number}"]))
    return tuple(shapes)
