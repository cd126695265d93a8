# SPDX-License-Identifier: Apache-2.0
"""Pictures of meshes: what is lit, from where, and which views are picked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sugar_extractors.outputs.mesh_pictures import BACKGROUND, pick_views, shaded_views
from sugar_scene.triangle_mesh import TriangleMesh
from tests.support.mesh_scenes import mesh_of, sphere
from tests.support.random_scenes import look_at

PAPER = np.round(np.array(BACKGROUND) * 255).astype(np.uint8)


def camera(width=80, height=60, principal=(0.0, 0.0), center=(0.0, -3.0, 0.0)):
    return look_at(center, width=width, height=height, focal=1.2 * width, principal=principal)


def covered(picture: np.ndarray) -> np.ndarray:
    return (picture != PAPER).any(axis=-1)


def test_a_ball_is_bright_on_the_upper_left_and_dark_on_the_lower_right():
    (picture,) = shaded_views(sphere(), [camera()], 80)
    assert picture.shape == (60, 80, 3)
    assert picture.dtype == np.uint8
    grey = picture.mean(axis=-1)
    assert covered(picture)[30, 40]
    assert not covered(picture)[0, 0]
    assert grey[24, 34] > grey[30, 40] > grey[36, 46]


@pytest.mark.parametrize(
    ("size", "width", "expected"),
    [
        ((80, 60), 160, (120, 160)),
        ((80, 60), 40, (30, 40)),
        ((60, 90), 45, (45, 30)),
        ((1000, 2), 50, (1, 50)),
    ],
)
def test_pictures_have_the_size_asked_for_and_the_shape_of_the_view(size, width, expected):
    (picture,) = shaded_views(sphere(), [camera(*size)], width)
    assert picture.shape[:2] == expected


def test_the_view_is_the_cameras_at_any_size():
    view = camera(principal=(12.0, -7.0))
    centers = []
    for width in (40, 80, 200):
        (picture,) = shaded_views(sphere(), [view], width)
        ys, xs = covered(picture).nonzero()
        centers.append(((xs.mean() + 0.5) / width, (ys.mean() + 0.5) / picture.shape[0]))
    assert np.allclose(centers, [view.cx / 80, view.cy / 60], atol=0.01)


def test_the_inner_side_has_another_colour():
    ball = sphere()
    near = ball.vertices[ball.faces].mean(axis=1)[:, 1] < 0
    bowl = mesh_of(ball.vertices, ball.faces[~near])
    (closed,), (opened,) = (shaded_views(mesh, [camera()], 80) for mesh in (ball, bowl))
    inside, outside = opened[30, 40].astype(int), closed[30, 40].astype(int)
    assert abs(outside[0] - outside[2]) < 10
    assert inside[0] - inside[2] > 40
    assert covered(opened).sum() > 0.93 * covered(closed).sum()


def test_colours_of_the_vertices_are_shown_without_light():
    ball = sphere()
    red = TriangleMesh(ball.vertices, ball.faces, np.full_like(ball.colors, (200, 10, 30)))
    (picture,) = shaded_views(red, [camera()], 80, colored=True)
    ys, xs = covered(picture).nonzero()
    inside = picture[ys.min() + 3 : ys.max() - 3, 40]
    assert (inside == (200, 10, 30)).all()


def test_a_view_without_a_surface_is_empty():
    for mesh in (mesh_of(np.zeros((0, 3)), []), mesh_of(np.ones((3, 3)), [[0, 1, 2]])):
        (picture,) = shaded_views(mesh, [camera()], 40)
        assert (picture == PAPER).all()


def ring(n: int):
    angles = 2 * math.pi * np.arange(n) / n
    return [
        look_at((3 * math.cos(a), 3 * math.sin(a), 0.0), name=f"{k}") for k, a in enumerate(angles)
    ]


def test_picked_views_are_spread():
    names = sorted(int(view.name) for view in pick_views(ring(40)))
    assert np.diff([*names, names[0] + 40]).tolist() == [10, 10, 10, 10]
    # Looking elsewhere from one place counts too.
    turned = [replace(ring(1)[0], rotation=view.rotation, name=view.name) for view in ring(8)]
    assert len({view.name for view in pick_views(turned, 3)}) == 3


def test_few_and_equal_views_are_all_taken():
    assert [v.name for v in pick_views(ring(3))] == ["0", "1", "2"]
    assert pick_views([]) == []
    same = [replace(ring(1)[0], name=str(k)) for k in range(6)]
    assert len({view.name for view in pick_views(same)}) == 4
