# SPDX-License-Identifier: Apache-2.0
"""A yard where people walk: ``python benchmarks/walkers_scene.py FOLDER``.

Houses stand around and in a yard, photographed on a ring. In a third of the photographs that are
trained on, two or three figures of a person's size are somewhere in it. ``truth/`` has masks that
are black where they are. Held-out photographs show the empty yard.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.relief_scene import make_folders, parser
from benchmarks.town_scene import Quads, SurfacePoints, house, observed_pixels, painted
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap_writing import TrackedPoints, ViewTracks, write_capture
from gaussian_splatting.scenes.scene import TEST_INTERVAL
from sugar_pipeline.demo.demo_texture import picture
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.surface_queries import Surface, sample_surface
from sugar_utils.entrypoint import run_main

SEED = 23
HALF = 1.6  # of the yard, world units
RING = 1.1  # radius of the ring of cameras
EYES = (0.25, 0.5)  # range of the heights of the cameras
FIGURE = 0.32  # height of a person
REACH = 0.75  # from the middle, within which persons walk
N_SAMPLES = 30_000
MIN_VIEWS = 3
FOCAL = 0.8  # in image widths
CHANGED = 12  # difference of bytes from which a pixel shows a person


def yard() -> np.ndarray:
    """Ground in cells, and houses: some in the middle, the others around. (Q, 4, 3)"""
    rng = np.random.default_rng(SEED)
    lines = np.linspace(-HALF, HALF, 17)
    x, y = np.meshgrid(lines, lines, indexing="ij")
    points = np.stack([x, y, np.zeros_like(x)], axis=-1)
    corners = [points[:-1, :-1], points[1:, :-1], points[1:, 1:], points[:-1, 1:]]
    parts = [np.stack(corners, axis=2).reshape(-1, 4, 3)]
    for angle in np.linspace(0, 2 * np.pi, 14, endpoint=False):
        parts.append(_on_ground(1.35 * np.array([np.cos(angle), np.sin(angle)]), rng))
    for middle in ((-0.25, 0.1), (0.3, -0.2)):
        parts.append(_on_ground(np.array(middle), rng))
    return np.concatenate(parts)


def _on_ground(middle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A house on flat ground. (Q, 4, 3)"""
    quads = house(middle, rng)
    # It was put on hills, a tenth into them.
    quads[..., 2] -= quads[..., 2].min() + 0.02
    return quads


def person(rng: np.random.Generator) -> np.ndarray:
    """Legs, body and head of a person who walks, as boxes. (Q, 4, 3)"""
    angle = rng.uniform(0, 2 * np.pi)
    distance = rng.uniform(0.45, REACH)
    place = distance * np.array([np.cos(angle), np.sin(angle), 0])
    turn = rng.uniform(0, 2 * np.pi)
    step = 0.05 * rng.uniform(-1, 1)
    boxes = [
        ((step, 0.03), 0.0, 0.5, 0.03),
        ((-step, -0.03), 0.0, 0.5, 0.03),
        ((0.0, 0.0), 0.48, 0.85, 0.07),
        ((0.0, 0.0), 0.85, 1.0, 0.04),
    ]
    cosine = np.cos(turn)
    sine = np.sin(turn)
    rotation = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    parts = []
    for (across, along), low, high, half in boxes:
        middle = np.array([across, along, 0])
        plan = half * np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]]) + middle
        bottom = plan + [0, 0, FIGURE * low]
        top = plan + [0, 0, FIGURE * high]
        sides = [[bottom[i], bottom[(i + 1) % 4], top[(i + 1) % 4], top[i]] for i in range(4)]
        parts.append(np.array([*sides, [top[0], top[1], top[2], top[3]]]))
    return np.concatenate(parts) @ rotation.T + place


def cameras(n_views: int, width: int) -> list[Camera]:
    """Views from a ring across the yard."""
    rng = np.random.default_rng(SEED + 1)
    views = []
    for number in range(n_views):
        angle = 2 * np.pi * number / n_views + rng.uniform(-0.03, 0.03)
        height = rng.uniform(*EYES)
        center = np.array([RING * np.cos(angle), RING * np.sin(angle), height])
        forward = np.array([0.0, 0.0, 0.12]) + rng.uniform(-0.1, 0.1, 3) - center
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right /= np.linalg.norm(right)
        rotation = np.stack([right, np.cross(forward, right), forward])
        view_height = round(0.75 * width)
        camera = Camera(
            name=f"view_{number:03d}.png",
            width=width,
            height=view_height,
            fx=FOCAL * width,
            fy=FOCAL * width,
            cx=width / 2,
            cy=view_height / 2,
            rotation=rotation,
            translation=-rotation @ center,
        )
        views.append(camera)
    return views


def _with(scene: TexturedMesh, people: TexturedMesh) -> TexturedMesh:
    """The scene with people in it; both have the same picture as texture."""
    return TexturedMesh(
        vertices=torch.cat([scene.vertices, people.vertices]),
        faces=torch.cat([scene.faces, people.faces + len(scene.vertices)]),
        uvs=torch.cat([scene.uvs, people.uvs]),
        texture=scene.texture,
    )


def run(args: argparse.Namespace) -> None:
    make_folders(args.folder)
    (args.folder / "truth").mkdir(exist_ok=True)
    quads = yard()
    empty = painted(quads)
    mesh = Quads(quads).mesh()
    samples = sample_surface(mesh.vertices, mesh.faces, N_SAMPLES, SEED)
    surface = Surface(mesh.vertices, mesh.faces)
    surface_points = SurfacePoints.of(samples)
    views = cameras(args.n_views, args.width)
    trained = [number for number in range(len(views)) if number % TEST_INTERVAL]
    choice = np.random.default_rng(SEED + 2).permutation(trained)
    with_people = set(choice[: len(trained) // 3]) if args.people else set()
    tracks = []
    n_seen = np.zeros(N_SAMPLES, int)
    sums = np.zeros((N_SAMPLES, 3))
    for number, camera in enumerate(views):
        pixels = picture(empty, camera)
        rows, keypoints = observed_pixels(surface, camera, surface_points)
        columns, lines = keypoints.astype(int).T
        n_seen[rows] += 1
        sums[rows] += pixels[lines, columns]
        tracks.append((rows, keypoints))
        is_person = np.zeros(pixels.shape[:2], bool)
        if number in with_people:
            rng = np.random.default_rng((SEED, number))
            people = [person(rng) for _ in range(rng.integers(2, 4))]
            crowded = picture(_with(empty, painted(np.concatenate(people))), camera)
            is_person = np.abs(crowded.astype(int) - pixels).max(axis=-1) > CHANGED
            pixels = np.where(is_person[..., None], crowded, pixels)
        Image.fromarray(pixels).save(args.folder / "images" / camera.name)
        truth = Image.fromarray(np.where(is_person, 0, 255).astype(np.uint8))
        truth.save(args.folder / "truth" / f"{camera.name}.png")
    is_point = n_seen >= MIN_VIEWS
    numbers = np.cumsum(is_point) - 1
    view_tracks = []
    for rows, keypoints in tracks:
        stays = is_point[rows]
        view_tracks.append(ViewTracks(numbers[rows[stays]], keypoints[stays]))
    colors = np.round(sums[is_point] / n_seen[is_point, None]).astype(np.uint8)
    points = TrackedPoints(samples.points[is_point], colors, view_tracks)
    write_capture(args.folder / "sparse" / "0", views, points)


if __name__ == "__main__":
    flags = parser("Make a yard in which people walk.")
    flags.add_argument("--n_views", type=int, default=56)
    flags.add_argument("--width", type=int, default=240, help="of the photographs, pixels")
    flags.add_argument("--people", type=int, choices=(0, 1), default=1)
    sys.exit(run_main(lambda: run(flags.parse_args())))
