# SPDX-License-Identifier: Apache-2.0
"""The visual hull of masks: points that enough views show outside of their masks."""

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.masks import VisualHull, distance_outside, hull_of

SIDE = 20


def camera(name="a", rotation=None, translation=(0.0, 0.0, 5.0)):
    """20 x 20 pixels; at the origin, a pixel is 0.5 wide."""
    turned = np.eye(3) if rotation is None else np.array(rotation, dtype=float)
    return Camera(name, SIDE, SIDE, 10.0, 10.0, 10.0, 10.0, turned, np.array(translation))


FRONT = camera()
SIDEWAYS = camera("b", [[0, 0, 1], [0, 1, 0], [-1, 0, 0]])
"""Looks along -x: its image x is the world's z."""


def square(first, last):
    """Counts in columns and rows first to last."""
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[first : last + 1, first : last + 1] = True
    return mask


def inside(points, cameras, masks, tolerance=0.0, weights=None):
    distances = [distance_outside(mask) for mask in masks]
    hull = VisualHull(cameras, distances, tolerance, weights)
    return hull.contains(torch.tensor(points)).tolist()


def test_one_of_two_views_is_enough_to_exclude_a_point():
    # Column of x at z = 0 is 10 + 2 x; the mask holds columns 8 to 11, x from -1 to 1.
    points = [[0.0, 0, 0], [0.9, 0, 0], [1.1, 0, 0], [0, 0, 1.1], [0, 1.1, 0]]
    masks = [square(8, 11)] * 2
    assert inside(points, [FRONT, SIDEWAYS], masks) == [True, True] + [False] * 3
    assert inside(points, [FRONT], masks[:1]) == [True, True, False, True, False]


def test_one_of_many_views_is_not_enough():
    masks = [square(8, 11)] * 9 + [square(0, 2)]
    assert inside([[0.0, 0.0, 0.0]], [FRONT] * 10, masks) == [True]
    two_wrong = [square(8, 11)] * 8 + [square(0, 2)] * 2
    assert inside([[0.0, 0.0, 0.0]], [FRONT] * 10, two_wrong) == [False]
    # Of many views more have to agree.
    assert inside([[0.0, 0.0, 0.0]], [FRONT] * 30, two_wrong[:1] * 28 + two_wrong[-2:]) == [True]


def test_views_of_no_weight_have_no_vote():
    masks = [square(8, 11), square(0, 2), square(0, 2)]
    assert inside([[0.0, 0.0, 0.0]], [FRONT] * 3, masks, weights=[1.0, 0.0, 0.0]) == [True]


def test_a_view_does_not_judge_what_it_does_not_show():
    behind, beside, at_camera = [0.0, 0, -6], [50.0, 0, 0], [0.0, 0, -5]
    empty = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    assert all(inside([behind, beside, at_camera], [FRONT], [empty]))


def test_votes_grow_with_the_distance_from_the_mask():
    # The columns are 12.2, 13.2, 14.2 and 17.2; the mask ends before column 12.
    points = torch.tensor([[1.1, 0.0, 0.0], [1.6, 0.0, 0.0], [2.1, 0.0, 0.0], [3.6, 0.0, 0.0]])
    distances = [distance_outside(square(8, 11))]
    votes, shown_by = VisualHull([FRONT], distances, tolerance=2.0).votes(points)
    assert votes.tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0])
    assert shown_by.tolist() == [1.0] * 4


def test_distances_are_in_quarters_of_a_pixel_and_end():
    mask = torch.zeros(3, 200, dtype=torch.bool)
    assert (distance_outside(mask) == 255).all()
    mask[:, 0] = True
    found = distance_outside(mask)[1]
    assert found[:4].tolist() == [0, 4, 8, 12]
    assert found[-1] == 255


def test_without_views_everything_is_inside():
    assert inside([[0.0, 0.0, 0.0]] * 3, [], []) == [True] * 3
    assert hull_of([FRONT]) is None
