# SPDX-License-Identifier: Apache-2.0
"""A town from the air: ``python benchmarks/town_scene.py FOLDER --side 20``.

Houses with gabled roofs in lots on hilly ground, photographed from ``side`` x ``side`` places in
turns straight down and from four sides. The whole surface is known, so ``mesh_quality.py`` measures
a mesh of it, and what is made of it in blocks can be compared with what is made of it whole.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.spatial import KDTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.relief_scene import make_folders, parser
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap_writing import TrackedPoints, ViewTracks, write_capture
from sugar_pipeline.demo.demo_texture import picture
from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.surface_queries import AreaSamples, Surface, sample_surface
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.device import float32_tensor
from sugar_utils.entrypoint import run_main
from sugar_utils.files import write_json_atomic
from tests.support.random_scenes import look_at

SPACING = 0.4  # of the cameras, world units
ALTITUDE = 1.5  # of the cameras above the ground
ALTITUDE_SPREAD = 0.1
TILT = 38.0  # of the views that do not look straight down, degrees
FOCAL = 1.0  # in image widths
LOT = 0.55  # side of a lot
CELL = 0.11  # side of the ground's cells
HILLS = 0.12  # height
REACH = 6.0  # on the ground, of a photograph: its upper corners look 70 degrees from straight down
BORDER = 0.5  # ground outside of the outermost cameras
N_PATCHES = 8  # of the texture, along each side
PATCH_TEXELS = 512
PATCH_SIDE = 1.6  # of the surface that a patch covers, world units
SAMPLES_PER_AREA = 2_500  # surface samples of a square unit
POINTS_SHARE = 0.2  # of the samples become points of the reconstruction
POINT_NOISE = 0.004
MIN_VIEWS = 3
SEED = 11


@dataclass(frozen=True)
class Quads:
    """Flat quadrangles, corners counterclockwise seen from outside. (Q, 4, 3)"""

    corners: np.ndarray

    def mesh(self) -> TriangleMesh:
        """Two triangles for each, with vertices of their own."""
        n = len(self.corners)
        first = 4 * np.arange(n)[:, None]
        faces = np.concatenate([first + [0, 1, 2], first + [0, 2, 3]], axis=1).reshape(-1, 3)
        vertices = self.corners.reshape(-1, 3)
        return TriangleMesh(vertices, faces, np.full(vertices.shape, 128, np.uint8))


def ground_height(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Height of the hills. (...) world units"""
    return HILLS * (np.sin(0.9 * x + 0.4) * np.cos(0.7 * y) + 0.4 * np.sin(2.1 * x - 1.3 * y))


def cells(half: float, n: int) -> np.ndarray:
    """Divide the level ground between -half and half into n x n cells. (Q, 4, 3)"""
    lines = np.linspace(-half, half, n + 1)
    x, y = np.meshgrid(lines, lines, indexing="ij")
    points = np.stack([x, y, np.zeros_like(x)], axis=-1)
    corners = [points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]]
    return np.stack(corners, axis=2).reshape(-1, 4, 3)


def ground(half: float) -> np.ndarray:
    """Cells of the hilly ground between -half and half. (Q, 4, 3)"""
    quads = cells(half, int(np.ceil(2 * half / CELL)))
    quads[..., 2] = ground_height(quads[..., 0], quads[..., 1])
    return quads


def turn_about_z(angle: float) -> np.ndarray:
    """Return the rotation by an angle, counterclockwise seen from above. (3, 3)"""
    cosine = np.cos(angle)
    sine = np.sin(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def house(middle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Walls and roof of a house. (6, 4, 3)"""
    width, depth = rng.uniform(0.16, 0.2, 2)
    height = rng.uniform(0.14, 0.42)
    ridge = height + rng.uniform(0.04, 0.12)
    turn = turn_about_z(rng.uniform(0, np.pi))
    base = -0.1  # below the ground around
    plan = np.array([[-width, -depth], [width, -depth], [width, depth], [-width, depth]])
    low = np.pad(plan, ((0, 0), (0, 1)), constant_values=base)
    high = np.pad(plan, ((0, 0), (0, 1)), constant_values=height)
    left = np.array([-width, 0, ridge])
    right = np.array([width, 0, ridge])
    walls = [[low[i], low[(i + 1) % 4], high[(i + 1) % 4], high[i]] for i in range(4)]
    roof = [[high[0], high[1], right, left], [high[2], high[3], left, right]]
    # Triangles below the ridge, as quadrangles with a double corner.
    gables = [[high[1], high[2], right, right], [high[3], high[0], left, left]]
    quads = np.array([*walls, *roof, *gables])
    return quads @ turn.T + [*middle, ground_height(*middle)]


def town(half: float) -> np.ndarray:
    """All quadrangles. (Q, 4, 3)"""
    rng = np.random.default_rng(SEED)
    parts = [ground(half)]
    for x in np.arange(-half + LOT, half - LOT / 2, LOT):
        for y in np.arange(-half + LOT, half - LOT / 2, LOT):
            middle = np.array([x, y]) + rng.uniform(-0.06, 0.06, 2)
            # Every sixth lot is a park.
            if rng.uniform() > 1 / 6:
                parts.append(house(middle, rng))
    return np.concatenate(parts)


def texture() -> np.ndarray:
    """Patches of paint: a hue each, noise of all sizes and a grid of bricks. (H, W, 3) uint8"""
    rng = np.random.default_rng(SEED + 1)
    side = N_PATCHES * PATCH_TEXELS
    image = np.zeros((side, side, 3), np.float32)
    for row in range(N_PATCHES):
        for column in range(N_PATCHES):
            hue = rng.uniform(0.25, 0.75, 3).astype(np.float32)
            paint = np.zeros((PATCH_TEXELS, PATCH_TEXELS, 1), np.float32)
            for cells in (4, 8, 16, 32, 64, 128, 256):
                noise = torch.from_numpy(rng.uniform(-1, 1, (1, 1, cells, cells)))
                size = (PATCH_TEXELS, PATCH_TEXELS)
                layer = torch.nn.functional.interpolate(noise, size, mode="bicubic")
                paint += 0.09 * layer[0, 0, :, :, None].numpy().astype(np.float32)
            brick = rng.integers(24, 64)
            lines = np.arange(PATCH_TEXELS) % brick < 3
            paint -= 0.12 * (lines[:, None] | lines[None, :])[..., None]
            rows = slice(row * PATCH_TEXELS, (row + 1) * PATCH_TEXELS)
            columns = slice(column * PATCH_TEXELS, (column + 1) * PATCH_TEXELS)
            image[rows, columns] = hue + paint * (0.7 + 0.6 * hue)
    return (255 * image.clip(0.02, 0.98)).astype(np.uint8)


def painted(quads: np.ndarray) -> TexturedMesh:
    """Give every quadrangle a place in a patch, all at one scale, with light of one direction."""
    rng = np.random.default_rng(SEED + 2)
    u_axis = quads[:, 1] - quads[:, 0]
    length = np.linalg.norm(u_axis, axis=1, keepdims=True)
    u_axis = u_axis / length
    normal = np.cross(u_axis, quads[:, 2] - quads[:, 0])
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    v_axis = np.cross(normal, u_axis)
    from_first = quads - quads[:, :1]
    u = np.einsum("qck,qk->qc", from_first, u_axis) / PATCH_SIDE
    v = np.einsum("qck,qk->qc", from_first, v_axis) / PATCH_SIDE
    u -= u.min(axis=1, keepdims=True)
    v -= v.min(axis=1, keepdims=True)
    room_u = 0.99 - u.max(axis=1, keepdims=True)
    room_v = 0.99 - v.max(axis=1, keepdims=True)
    patch = rng.integers(0, N_PATCHES, (len(quads), 2))
    u += patch[:, :1] + 0.005 + rng.uniform(0, 1, room_u.shape) * room_u
    v += patch[:, 1:] + 0.005 + rng.uniform(0, 1, room_v.shape) * room_v
    uvs = np.stack([u, v], axis=-1) / N_PATCHES
    corners = np.concatenate([uvs[:, [0, 1, 2]], uvs[:, [0, 2, 3]]], axis=1).reshape(-1, 3, 2)
    mesh = Quads(quads).mesh()
    return TexturedMesh(
        vertices=float32_tensor(mesh.vertices),
        faces=torch.from_numpy(mesh.faces),
        uvs=float32_tensor(corners),
        texture=torch.from_numpy(texture()),
    )


def camera_at(
    name: str, center: np.ndarray, target: np.ndarray, width: int, focal: float
) -> Camera:
    """Return a camera with square pixels that looks at a target; ``focal`` in image widths."""
    size = {"width": width, "height": round(0.75 * width), "focal": focal * width}
    view = look_at(center, target, name=name, **size)
    return replace(view, fy=view.fx)


def cameras(side: int, width: int, height: int) -> list[Camera]:
    """Views of the town, row by row; the direction changes from view to view."""
    rng = np.random.default_rng(SEED + 3)
    views = []
    for row in range(side):
        for column in range(side):
            number = row * side + column
            x = (column - (side - 1) / 2) * SPACING
            y = (row - (side - 1) / 2) * SPACING
            z = ground_height(x, y) + ALTITUDE + ALTITUDE_SPREAD * rng.uniform(-1, 1)
            # Of five views one looks down; the directions of neighbours differ.
            kind = (number + 2 * row) % 5
            tilt = 0.0 if kind == 4 else np.radians(TILT)
            azimuth = np.pi / 2 * kind + rng.uniform(-0.2, 0.2)
            side_step = np.array([np.cos(azimuth), np.sin(azimuth), 0.0])
            forward = np.sin(tilt) * side_step - [0.0, 0.0, np.cos(tilt)]
            right = np.array([np.sin(azimuth), -np.cos(azimuth), 0.0])
            down = np.cross(forward, right)
            rotation = np.stack([right, down, forward])
            views.append(
                Camera(
                    name=f"view_{number:04d}.jpg",
                    width=width,
                    height=height,
                    fx=FOCAL * width,
                    fy=FOCAL * width,
                    cx=width / 2,
                    cy=height / 2,
                    rotation=rotation,
                    translation=-rotation @ np.array([x, y, z]),
                )
            )
    return views


@dataclass(frozen=True)
class SurfacePoints:
    """Points of the surface that views are asked about."""

    positions: np.ndarray  # (P, 3)
    normals: np.ndarray  # (P, 3)
    tree: KDTree  # of their places on the ground

    @classmethod
    def of(cls, samples: AreaSamples) -> SurfacePoints:
        """Index the samples of a surface."""
        return cls(samples.points, samples.normals, KDTree(samples.points[:, :2]))

    def near(self, camera: Camera) -> np.ndarray:
        """Rows of the points that are near enough to a camera to be in its image. Ascending"""
        return np.sort(self.tree.query_ball_point(camera.center[:2], REACH))


def observed_pixels(
    surface: Surface, camera: Camera, surface_points: SurfacePoints
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the points that a view sees, (n,), and their pixels, (n, 2)."""
    nearby = surface_points.near(camera)
    points = surface_points.positions[nearby]
    normals = surface_points.normals[nearby]
    view = camera.to_view(points)
    depth = np.where(view[:, 2] > 0, view[:, 2], 1.0)
    pixels = view[:, :2] / depth[:, None] * [camera.fx, camera.fy] + [camera.cx, camera.cy]
    inside = (view[:, 2] > 0) & (pixels > 1).all(axis=1)
    inside &= (pixels < np.array(camera.size) - 1).all(axis=1)
    to_eye = camera.center - points
    inside &= (to_eye * normals).sum(axis=1) > 0.1 * np.linalg.norm(to_eye, axis=1)
    rows = np.flatnonzero(inside)
    starts = points[rows] + 1e-3 * normals[rows]
    rays = torch.from_numpy(camera.center - starts).float()
    is_free = ~surface.blocked(torch.from_numpy(starts).float(), rays).numpy()
    return nearby[rows[is_free]], pixels[rows[is_free]]


class ObservedSamples:
    """How many views see each sample of a surface, in which colours, and where in them.

    Args:
        is_point: Whether a sample becomes a point of the reconstruction. (N,) bool
    """

    def __init__(self, is_point: np.ndarray) -> None:
        self.n_views = np.zeros(len(is_point), int)
        self._is_point = is_point
        self._color_sums = np.zeros((len(is_point), 3))
        self._tracks: list[ViewTracks] = []

    def add(self, pixels: np.ndarray, rows: np.ndarray, keypoints: np.ndarray) -> None:
        """Add a photograph and what :func:`observed_pixels` says of it."""
        self.n_views[rows] += 1
        columns, lines = keypoints.astype(int).T
        self._color_sums[rows] += pixels[lines, columns]
        of_points = self._is_point[rows]
        self._tracks.append(ViewTracks(rows[of_points], keypoints[of_points]))

    def points(self, positions: np.ndarray) -> TrackedPoints:
        """Return the points that enough views see; positions of all samples: (N, 3)"""
        is_point = self._is_point & (self.n_views >= MIN_VIEWS)
        number = np.cumsum(is_point) - 1
        views = []
        for rows, keypoints in self._tracks:
            stays = is_point[rows]
            views.append(ViewTracks(number[rows[stays]], keypoints[stays]))
        colors = np.round(self._color_sums[is_point] / self.n_views[is_point, None])
        return TrackedPoints(positions[is_point], colors.astype(np.uint8), views)


def photographed(textured: TexturedMesh, camera: Camera, width: int) -> np.ndarray:
    """Render a photograph at a width, and enlarge it to the size of its camera. (H, W, 3) uint8"""
    rendered = picture(textured, camera.reduced(width))
    size = camera.size
    return np.asarray(Image.fromarray(rendered).resize(size, Image.Resampling.BICUBIC))


def run(args: argparse.Namespace) -> None:
    make_folders(args.folder)
    half = (args.side - 1) / 2 * SPACING + BORDER
    quads = town(half)
    mesh = Quads(quads).mesh()
    textured = painted(quads)
    views = cameras(args.side, args.width, round(0.75 * args.width))
    surface = Surface(mesh.vertices, mesh.faces)
    n_samples = round(SAMPLES_PER_AREA * (2 * half) ** 2)
    samples = sample_surface(mesh.vertices, mesh.faces, n_samples, SEED)
    surface_points = SurfacePoints.of(samples)
    is_point = np.random.default_rng(SEED + 4).uniform(size=n_samples) < POINTS_SHARE
    observed = ObservedSamples(is_point)
    for camera in views:
        pixels = photographed(textured, camera, args.rendered_width or args.width)
        Image.fromarray(pixels).save(args.folder / "images" / camera.name, quality=95)
        observed.add(pixels, *observed_pixels(surface, camera, surface_points))
    points = observed.points(samples.points)
    noise = np.random.default_rng(SEED + 5).normal(size=points.positions.shape)
    points = replace(points, positions=points.positions + POINT_NOISE * noise)
    write_capture(args.folder / "sparse" / "0", views, points)
    visible = observed.n_views >= MIN_VIEWS
    write_truth(args.folder, mesh, samples.points[visible], samples.normals[visible])


def write_truth(folder: Path, mesh: TriangleMesh, points: np.ndarray, normals: np.ndarray) -> None:
    """Write the surface, its visible samples and facts, for ``mesh_quality.py``."""
    triangle_mesh.write_mesh_ply(folder / "gt_object.ply", mesh)
    grey = np.full(points.shape, 128, np.uint8)
    cloud = TriangleMesh(points, np.zeros((0, 3), np.int64), grey, normals)
    triangle_mesh.write_mesh_ply(folder / "gt_visible.ply", cloud)
    facts = {
        "object_bbox": [mesh.vertices.min(axis=0).tolist(), mesh.vertices.max(axis=0).tolist()],
        "up": "+z",
        "gt_visible_object_samples": len(points),
    }
    write_json_atomic(folder / "gt.json", facts)


if __name__ == "__main__":
    flags = parser("Make a town from the air, whose surface is known.")
    flags.add_argument("--side", type=int, default=20, help="rows and columns of photographs")
    flags.add_argument("--width", type=int, default=320, help="of the photographs, pixels")
    flags.add_argument(
        "--rendered_width",
        type=int,
        help="at which photographs are rendered before they are enlarged: thousands of large ones "
        "are made sooner",
    )
    sys.exit(run_main(lambda: run(flags.parse_args())))
