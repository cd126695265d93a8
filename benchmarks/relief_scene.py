# SPDX-License-Identifier: Apache-2.0
"""A scene of known relief: ``python benchmarks/relief_scene.py FOLDER``.

A ring with bumps and dents over the disc of the demo, photographed like it, in 60 views of
480 x 360. In each quarter they are 1, 2, 3 or 4 pixels high, and 4 to 10 pixels wide. What a method
smooths away is missing from its mesh: ``benchmarks/mesh_quality.py`` measures it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from sugar_pipeline.demo.demo_scene import write_scene
from sugar_pipeline.demo.demo_surface import closed_grid_mesh
from sugar_pipeline.demo.demo_texture import closed_grid_chart
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser

N_CELLS = (1800, 700)  # along the ring and around it
TEXELS = (4096, 1600)
RADIUS = 0.36  # of the ring
THICKNESS = 0.135  # radius of its tube
TILT = np.radians(28)
HEIGHT = 0.42  # of its middle above the disc
PIXEL = 2.0 / 539  # side of a pixel on the surface, world units
DETAIL = 1.5  # of the disc's texture
PARAMETERS = {"n_views": 60, "width": 480, "height": 360, "seed": 3}


@dataclass(frozen=True)
class Bumps:
    """Bumps of one quarter of the ring; lengths in pixels."""

    height: float
    width: float  # standard deviation of the bell
    spacing: float


QUARTERS = (
    Bumps(1.0, 2.0, 9.0),
    Bumps(2.0, 3.0, 13.0),
    Bumps(3.0, 4.0, 17.0),
    Bumps(4.0, 5.0, 21.0),
)


def relief() -> np.ndarray:
    """Height of the relief at the vertices of the ring. (A, B) world units"""
    heights = np.zeros(N_CELLS)
    rng = np.random.default_rng(5)
    for quarter, bumps in enumerate(QUARTERS):
        n_along = int(2 * np.pi * RADIUS / 4 / PIXEL // bumps.spacing)
        n_around = int(2 * np.pi * THICKNESS / PIXEL // bumps.spacing)
        for i in range(n_along):
            for j in range(n_around):
                shift_along, shift_around = 0.2 * rng.uniform(-1, 1, size=2)
                u = (quarter + (i + 0.5 + shift_along) / n_along) / 4
                v = (j + 0.5 + shift_around) / n_around
                # Two bumps and a dent, in turns.
                sign = 1 if (i + j) % 3 else -1
                _add_bump(heights, u, v, bumps, sign)
    return heights * PIXEL


def _add_bump(heights: np.ndarray, u: float, v: float, bumps: Bumps, sign: int) -> None:
    """Add a bell around a place, along the ring and around it, each from 0 to 1."""
    n_along, n_around = N_CELLS
    reach = 4 * bumps.width * PIXEL
    reach_along = int(reach / (2 * np.pi * (RADIUS - THICKNESS)) * n_along) + 1
    reach_around = int(reach / (2 * np.pi * THICKNESS) * n_around) + 1
    rows = np.arange(-reach_along, reach_along + 1) + int(u * n_along)
    columns = np.arange(-reach_around, reach_around + 1) + int(v * n_around)
    # In pixels on the surface; the ring is wider outside.
    girth = 2 * np.pi * (RADIUS + THICKNESS * np.cos(2 * np.pi * v)) / PIXEL
    x = (rows / n_along - u) * girth
    y = (columns / n_around - v) * 2 * np.pi * THICKNESS / PIXEL
    squared = x[:, None] ** 2 + y[None, :] ** 2
    bell = np.where(
        squared < (3.5 * bumps.width) ** 2, np.exp(-0.5 * squared / bumps.width**2), 0.0
    )
    heights[np.ix_(rows % n_along, columns % n_around)] += sign * bumps.height * bell


def ring(heights: np.ndarray) -> np.ndarray:
    """Vertices of the ring with a relief. (A, B, 3) world units"""
    u, v = np.indices(heights.shape)
    along = 2 * np.pi * u / heights.shape[0]
    around = 2 * np.pi * v / heights.shape[1]
    outward = np.stack(
        [np.cos(along) * np.cos(around), np.sin(along) * np.cos(around), np.sin(around)], axis=-1
    )
    middle = RADIUS * np.stack([np.cos(along), np.sin(along), 0 * along], axis=-1)
    points = middle + (THICKNESS + heights)[..., None] * outward
    cosine, sine = np.cos(TILT), np.sin(TILT)
    tilt = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    return points @ tilt.T + [0.0, 0.0, HEIGHT]


def make_folders(folder: Path) -> None:
    """Make the folders of a new scene."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose a new folder")
    for name in ("images", "sparse/0"):
        (folder / name).mkdir(parents=True, exist_ok=True)


def run(args: argparse.Namespace) -> None:
    make_folders(args.folder)
    # Against the sense in which the ring's angles turn.
    mesh = closed_grid_mesh(ring(relief())[::-1])
    write_scene(args.folder, mesh, closed_grid_chart(mesh, N_CELLS, TEXELS), DETAIL, PARAMETERS)


def parser(description: str) -> Parser:
    flags = Parser(description=description)
    flags.add_argument("folder", type=Path, metavar="FOLDER", help="of the scene; must be new")
    return flags


if __name__ == "__main__":
    description = "Make a scene whose surface has a relief of a few pixels."
    sys.exit(run_main(lambda: run(parser(description).parse_args())))
