# SPDX-License-Identifier: Apache-2.0
"""Words for how good results are."""

import numpy as np
import pytest
import torch

from sugar_pipeline.quality.grading import (
    Grade,
    grade_mesh,
    grade_model,
    holes_in,
    loses,
    mesh_health,
    worst,
)
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import tiny_cameras


@pytest.mark.parametrize(
    ("psnr", "held_out", "word"),
    [(30.0, True, "good"), (20.0, True, "usable"), (12.0, True, "poor"), (24.0, False, "usable")],
)
def test_models_are_graded_by_their_views(psnr, held_out, word):
    grade = grade_model({"psnr": psnr}, held_out)
    assert grade.word == word
    assert f"{psnr:.1f} dB" in grade.reason


def test_nothing_is_said_where_nothing_was_measured():
    assert grade_model({}, True) is None
    assert grade_mesh({}) is None
    assert worst([]) is None


def test_a_large_gap_makes_a_good_model_usable():
    grade = grade_model({"psnr": 28.0, "gap": 7.0}, True)
    assert grade.word == "usable"
    assert "7.0 dB better" in grade.reason


def test_what_fails_its_checks_is_poor():
    assert grade_model({"psnr": 5.0, "constant_psnr": 12.0}, True).word == "poor"
    assert grade_mesh({"covered_share": 0.001}).word == "poor"


def test_the_worst_figure_of_a_mesh_decides():
    figures = {"mask_iou": 0.95, "hole_share": 0.03, "psnr": 24.0}
    grade = grade_mesh(figures)
    assert grade.word == "usable"
    assert "holes are 3.0%" in grade.reason
    assert grade_mesh(figures | {"hole_share": 0.002}).word == "good"
    assert worst([Grade("good", "a"), Grade("poor", "b"), Grade("usable", "c")]).reason == "b"


def test_a_refinement_loses_what_its_views_are_worse():
    assert loses({"psnr": 19.5}, {"psnr": 26.3}) == pytest.approx(6.8)
    assert loses({"psnr": 27.0}, {"psnr": 26.3}) == 0.0
    assert loses({}, {"psnr": 26.3}) == 0.0


def test_holes_are_what_a_mesh_encloses_and_does_not_cover():
    covered = torch.zeros(20, 20, dtype=torch.bool)
    covered[4:16, 4:16] = True
    covered[8:10, 8:11] = False
    rims = torch.zeros_like(covered)
    rims[7:11, 7:12] = True
    assert int(holes_in(covered, rims, None).sum()) == 6
    # Without a rim it is an opening between parts of the object.
    assert int(holes_in(covered, torch.zeros_like(covered), None).sum()) == 0
    # Where the mask has a hole as well, it is one of the object.
    assert int(holes_in(covered, rims, covered).sum()) == 0
    open_to_outside = covered.clone()
    open_to_outside[8, :9] = False
    assert int(holes_in(open_to_outside, rims, None).sum()) == 0


def test_a_hole_in_a_mesh_is_measured():
    mesh = icosahedron()
    cameras = tiny_cameras(4)

    def photograph(camera):
        return torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)

    assert mesh_health(mesh, cameras, photograph)["hole_share"] == 0
    first = cameras[0]
    centers = mesh.vertices[mesh.faces].mean(axis=1)
    facing = centers @ first.center / np.linalg.norm(first.center)
    # Seen through from the first camera: the nearest faces and those behind them.
    sides = np.abs(facing) > np.sort(np.abs(facing))[-5]
    pierced = type(mesh)(mesh.vertices, mesh.faces[~sides], mesh.colors)
    assert mesh_health(pierced, [first], photograph)["hole_share"] > 0.02
