# SPDX-License-Identifier: Apache-2.0
"""A scene of thin parts: ``python benchmarks/rods_scene.py FOLDER``.

Rods of 1, 2 and 4 pixels diameter, upright and lying, a ring, and a sheet that is seen from both
sides, over the disc of the demo, photographed like it, in 60 views of 480 x 360. The scene also has
a file of its parts, ``gt_parts.json``: with it ``benchmarks/mesh_quality.py`` measures the share of
each part that a mesh reaches within a pixel.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.relief_scene import DETAIL, PARAMETERS, PIXEL, make_folders, parser
from sugar_pipeline.demo.demo_paint import knot_paint
from sugar_pipeline.demo.demo_scene import write_scene
from sugar_pipeline.demo.demo_texture import Chart
from sugar_scene.triangle_mesh import TriangleMesh, doubled_area_normals, with_vertex_normals
from sugar_utils.entrypoint import run_main
from sugar_utils.files import write_json_atomic

N_AROUND = 96  # vertices around a part
ROW = 2 * PIXEL  # distance of two rows along a part, at most
TEXELS_PER_ROW = 6
TEXELS_AROUND = 720
GREY = 128
DIAMETERS = (1, 2, 4)  # of the rods, in pixels
RING_DIAMETER = 3.0  # of its tube, in pixels
RING_RADIUS = 0.2
SHEET_THICKNESS = 3.0  # pixels
SHEET_WIDTH = 0.34
SHEET_HEIGHT = 0.4


@dataclass(frozen=True)
class Part:
    """A tube: rows of vertices around it."""

    name: str
    points: np.ndarray  # counted against the sense of rotation seen from outside. (A, B, 3)
    is_closed: bool  # whether the last row is joined to the first


def circle(diameter: float) -> np.ndarray:
    """Corners of a round section, counterclockwise. (B, 2)"""
    angles = 2 * np.pi * np.arange(N_AROUND) / N_AROUND
    return diameter / 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def slab(width: float, thickness: float) -> np.ndarray:
    """Corners of a section with two flat sides and round edges, counterclockwise. (B, 2)"""
    flat = width - thickness
    n_side = 3 * N_AROUND // 8
    n_edge = N_AROUND // 2 - n_side
    turns = np.pi * (np.arange(n_edge) / n_edge - 0.5)
    edge = thickness / 2 * np.stack([np.cos(turns), np.sin(turns)], axis=1) + [flat / 2, 0]
    x = flat / 2 - flat * np.arange(n_side) / n_side
    side = np.stack([x, np.full(n_side, thickness / 2)], axis=1)
    half = np.concatenate([edge, side])
    return np.concatenate([half, -half])


def straight(name: str, start: Sequence[float], end: Sequence[float], section: np.ndarray) -> Part:
    """Move a section straight from one place to another, and close the ends."""
    way = np.subtract(end, start)
    length = float(np.linalg.norm(way))
    direction = way / length
    aside = np.array([0.0, 0.0, 1.0]) if abs(direction[2]) < 0.7 else np.array([0.6, 0.8, 0.0])
    second = np.cross(direction, aside)
    second /= np.linalg.norm(second)
    first = np.cross(second, direction)
    outline = section[:, :1] * first + section[:, 1:] * second
    shares = np.linspace(0, 1, 1 + math.ceil(length / ROW))
    middles = np.asarray(start) + shares[:, None] * way
    sides = middles[:, None] + outline
    caps = np.broadcast_to(middles[[0, -1], None], (2, len(section), 3))
    return Part(name, np.concatenate([caps[:1], sides, caps[1:]]), is_closed=False)


def ring(name: str, middle: Sequence[float], tilt: float, section: np.ndarray) -> Part:
    """Move a section around a circle that is tilted about the x axis by some degrees."""
    n = math.ceil(2 * np.pi * RING_RADIUS / ROW)
    angles = 2 * np.pi * np.arange(n) / n
    cosine = math.cos(math.radians(tilt))
    sine = math.sin(math.radians(tilt))
    outward = np.stack([np.cos(angles), cosine * np.sin(angles), sine * np.sin(angles)], axis=1)
    # Outwards, then down the axis: so the circle is followed counterclockwise.
    axis = np.array([0.0, sine, -cosine])
    outline = section[:, :1] * outward[:, None] + section[:, 1:] * axis
    points = np.asarray(middle) + RING_RADIUS * outward[:, None] + outline
    return Part(name, points, is_closed=True)


def parts() -> list[Part]:
    """All parts of the object."""
    tubes = []
    for k, diameter in enumerate(DIAMETERS):
        section = circle(diameter * PIXEL)
        x = -0.1 + 0.16 * k
        foot = [x, -0.3, 0.04]
        tubes.append(straight(f"upright rod, {diameter} px", foot, [x, -0.24, 0.84], section))
        z = 0.3 + 0.18 * k
        start = [-0.46, 0.26 + 0.05 * k, z]
        end = [0.46, 0.36 - 0.05 * k, z + 0.03]
        tubes.append(straight(f"lying rod, {diameter} px", start, end, section))
    thickness = SHEET_THICKNESS * PIXEL
    foot = [-0.36, -0.04, 0.1]
    top = [-0.36, 0.06, 0.1 + SHEET_HEIGHT]
    name = f"sheet, {SHEET_THICKNESS:g} px thick"
    tubes.append(straight(name, foot, top, slab(SHEET_WIDTH, thickness)))
    name = f"ring, {RING_DIAMETER:g} px"
    tubes.append(ring(name, [0.16, 0.04, 0.42], 55.0, circle(RING_DIAMETER * PIXEL)))
    return tubes


class JoinedParts(NamedTuple):
    """The parts as one object."""

    mesh: TriangleMesh
    chart: Chart  # with the grids of the parts one below the other
    n_faces: list[int]  # of each part, in the order of the mesh's faces


def joined(tubes: Sequence[Part]) -> JoinedParts:
    """Join parts to one mesh and one chart."""
    vertices = np.concatenate([part.points.reshape(-1, 3) for part in tubes])
    rows_of_part = [_grid_rows(part) for part in tubes]
    n_rows = sum(map(len, rows_of_part))
    faces = []
    corners = []
    n_faces = []
    first_vertex = 0
    first_row = 0
    for part, rows in zip(tubes, rows_of_part, strict=True):
        part_faces, cells = _grid_faces(part)
        # Caps meet in a point: half of their triangles have no area.
        normals = doubled_area_normals(part.points.reshape(-1, 3), part_faces)
        areas = np.linalg.norm(normals, axis=1)
        is_solid = areas > 1e-3 * np.median(areas)
        faces.append(part_faces[is_solid] + first_vertex)
        # The first row is there twice.
        places = (cells[is_solid] + [first_row + 1, 0]) / [n_rows - 1, N_AROUND]
        corners.append(places)
        n_faces.append(int(is_solid.sum()))
        first_vertex += part.points.shape[0] * N_AROUND
        first_row += len(rows)
    grey = np.full(vertices.shape, GREY, np.uint8)
    mesh = with_vertex_normals(TriangleMesh(vertices, np.concatenate(faces), grey))
    assert mesh.normals is not None
    chart = Chart(
        points=_stacked(tubes, vertices, rows_of_part),
        normals=_stacked(tubes, mesh.normals, rows_of_part),
        corners=np.concatenate(corners),
        texels=(TEXELS_PER_ROW * n_rows, TEXELS_AROUND),
        paint=knot_paint,
    )
    return JoinedParts(mesh, chart, n_faces)


def _grid_rows(part: Part) -> np.ndarray:
    """Rows of a part in the chart; the first and the last are there twice, as a margin."""
    n_rows = len(part.points)
    last = 0 if part.is_closed else n_rows - 1
    inner = [*range(n_rows), 0] if part.is_closed else [*range(n_rows)]
    return np.array([0, *inner, last])


def _grid_faces(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Faces of a part, (F, 3), and row and column of their corners in its grid, (F, 3, 2)."""
    n_rows = len(part.points)
    n_cells = n_rows if part.is_closed else n_rows - 1
    along, around = np.indices((n_cells, N_AROUND)).reshape(2, -1, 1)
    cell_corners = np.array([[0, 0], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0]])
    cells = np.stack([along + cell_corners[:, 0], around + cell_corners[:, 1]], axis=-1)
    cells = cells.reshape(-1, 3, 2)
    faces = cells[..., 0] % n_rows * N_AROUND + cells[..., 1] % N_AROUND
    return faces, cells


def _stacked(
    tubes: Sequence[Part], values: np.ndarray, rows_of_part: Sequence[np.ndarray]
) -> np.ndarray:
    """Grids of values of all vertices, one below the other; the first column repeats. (R, B, 3)"""
    first = 0
    grids = []
    for part, rows in zip(tubes, rows_of_part, strict=True):
        grid = values.reshape(-1, N_AROUND, 3)[first : first + len(part.points)]
        grids.append(grid[rows])
        first += len(part.points)
    return np.pad(np.concatenate(grids), ((0, 0), (0, 1), (0, 0)), mode="wrap")


def run(args: argparse.Namespace) -> None:
    make_folders(args.folder)
    tubes = parts()
    union = joined(tubes)
    write_scene(args.folder, union.mesh, union.chart, DETAIL, PARAMETERS)
    faces = {part.name: n for part, n in zip(tubes, union.n_faces, strict=True)}
    write_json_atomic(args.folder / "gt_parts.json", {"pixel": PIXEL, "faces": faces})


if __name__ == "__main__":
    description = "Make a scene of rods, a ring and a sheet of a few pixels."
    sys.exit(run_main(lambda: run(parser(description).parse_args())))
