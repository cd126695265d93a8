# SPDX-License-Identifier: Apache-2.0
"""The visual hull of masks: a point that one view shows outside of its mask is outside."""

import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.visual_hull import hull_of, inside_hull

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


def test_one_view_is_enough_to_exclude_a_point():
    # Column of x at z = 0 is 10 + 2 x; the mask holds columns 8 to 11, x from -1 to 1.
    points = torch.tensor([[0.0, 0, 0], [0.9, 0, 0], [1.1, 0, 0], [0, 0, 1.1], [0, 1.1, 0]])
    masks = [square(8, 11)] * 2
    assert inside_hull(points, [FRONT, SIDEWAYS], masks).tolist() == [True, True] + [False] * 3
    alone = inside_hull(points, [FRONT], masks[:1])
    assert alone.tolist() == [True, True, False, True, False]


def test_a_view_does_not_judge_what_it_does_not_show():
    behind, beside, at_camera = [0.0, 0, -6], [50.0, 0, 0], [0.0, 0, -5]
    points = torch.tensor([behind, beside, at_camera])
    assert inside_hull(points, [FRONT], [torch.zeros(SIDE, SIDE, dtype=torch.bool)]).all()


def test_the_tolerance_grows_the_masks():
    points = torch.tensor([[1.1, 0.0, 0.0], [1.6, 0.0, 0.0], [2.1, 0.0, 0.0]])
    found = [inside_hull(points, [FRONT], [square(8, 11)], n).tolist() for n in (0, 1, 2)]
    assert found == [[False] * 3, [True, False, False], [True, True, False]]


def test_without_views_everything_is_inside():
    assert inside_hull(torch.zeros(3, 3), [], []).all()
    assert hull_of([FRONT]) is None
