# SPDX-License-Identifier: Apache-2.0
"""Geometry of meshes: ``python benchmarks/mesh_quality.py MESH [MESH...] SCENE``.

The scene must know its own geometry, as the rendered ones do (``gt_object.ply``,
``gt_visible.ply``, ``gt.json``; the demo's scene has them). A mesh is a ``.ply``, the ``.pt`` of a
refined model, or an ``.obj`` of triangles. What is measured, and where, stands at the top of
``sugar_pipeline/quality/mesh_quality.py``; in short: only the object, distances in % of its
longest side. Where the scene names its parts (``gt_parts.json``, see ``benchmarks/rods_scene.py``),
the share of each part's visible samples that a mesh reaches within a pixel is measured, too.

The figures depend on the samples: with the default number the accuracy of one mesh changes by
less than a hundredth of itself from seed to seed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from scipy.spatial import KDTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.formats.placement import Placement
from sugar_extractors.any_mesh import read_any_mesh
from sugar_pipeline.quality.mesh_quality import (
    N_SAMPLES,
    THRESHOLDS,
    Reference,
    compare_surfaces,
    read_reference,
)
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.entrypoint import run_main
from sugar_utils.files import read_json
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.schemas import conform

PARTS_FILE = "gt_parts.json"


class Parts(msgspec.Struct):
    """Content of the file of the parts of an object."""

    pixel: float  # side of a pixel on the surface, world units
    faces: dict[str, int]  # how many faces each part has, in the order of the object's faces


def read_parts(scene_dir: Path) -> Parts | None:
    """Read the parts of a scene's object; None where it names none."""
    path = scene_dir / PARTS_FILE
    if not path.is_file():
        return None
    return conform(read_json(path), Parts, path, "make the scene again")


def part_completeness(
    mesh: TriangleMesh, reference: Reference, parts: Parts
) -> list[tuple[str, str]]:
    """Name of each part, and the share of its visible samples within a pixel of a mesh."""
    origin = (reference.low + reference.high) / 2
    points = (reference.visible_points - origin) / reference.size
    true_vertices = (reference.surface.vertices - origin) / reference.size
    vertices = (mesh.vertices - origin) / reference.size
    faces = Surface(true_vertices, reference.surface.faces).nearest(points).faces
    distances = Surface(vertices, mesh.faces).nearest(points).distances
    is_reached = distances < parts.pixel / reference.size
    rows = []
    first = 0
    for name, n_faces in parts.faces.items():
        is_of_part = (faces >= first) & (faces < first + n_faces)
        rows.append((f"{name}, within 1 px", f"{is_reached[is_of_part].mean():.1%}"))
        first += n_faces
    return rows


def read_in_scene(path: Path) -> TriangleMesh:
    """Read a mesh in the world of its scene; those of a folder of results stand upright."""
    placement = Placement.of(path)
    mesh = read_any_mesh(path, print, placement.offset)
    vertices = moved_points(mesh.vertices, placement.to_scene())
    return replace(mesh, vertices=vertices, normals=None)


def spacing(reference: Reference) -> float:
    """Mean distance of the known visible samples to their nearest one, in world units."""
    points = reference.visible_points
    return float(KDTree(points).query(points, k=2)[0][:, 1].mean())


def run(args: argparse.Namespace) -> None:
    print_machine()
    reference = read_reference(args.scene)
    thresholds = THRESHOLDS
    if args.spacings is not None:
        thresholds = (*THRESHOLDS, args.spacings * spacing(reference) / reference.size)
    meshes = [read_in_scene(path) for path in args.meshes]
    columns = [
        compare_surfaces(
            mesh, reference, n_samples=args.samples, seed=args.seed, thresholds=thresholds
        ).rows()
        for mesh in meshes
    ]
    parts = read_parts(args.scene)
    if parts is not None:
        for mesh, column in zip(meshes, columns, strict=True):
            column.extend(part_completeness(mesh, reference, parts))
    print(f"scene: {args.scene}, object of size {reference.size:g}, {args.samples:,} samples\n")
    labels = [f"[{k}]" for k in range(1, len(args.meshes) + 1)]
    print(*map("{} {}".format, labels, args.meshes), "", sep="\n")
    rows = [[cells[0][0], *(value for _, value in cells)] for cells in zip(*columns, strict=True)]
    print_table(["", *labels], rows)


def parser() -> Parser:
    flags = Parser(
        description="Measure meshes against a known surface.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("meshes", type=Path, nargs="+", metavar="MESH", help=".ply, refined .pt or .obj")
    add("scene", type=Path, metavar="SCENE", help="scene folder with its ground truth")
    add("--samples", type=positive_int, default=N_SAMPLES, help="samples of a mesh")
    add(
        "--spacings",
        type=positive_float,
        help="also the F-score at so many mean distances of known samples to their nearest one; "
        "1.5 as in the evaluation of CityGaussianV2; unset: none",
    )
    add("--seed", type=integer, default=0, help="seed of the samples")
    return flags


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parser().parse_args())))
