# SPDX-License-Identifier: Apache-2.0
"""Evaluations besides held-out figures: training views, floaters, gaps, worst photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import read_colmap
from gaussian_splatting.data.names import ImageFolder
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.engine.reporting.evaluation import EvaluationResult, ViewScore
from gaussian_splatting.engine.reporting.view_findings import Findings, find, floater_share
from gaussian_splatting.engine.reporting.view_pictures import (
    DEPTH_COLORS,
    DepthRange,
    depth_picture,
    depth_range,
)
from tests.support.tiny_scene import make_tiny_scene, tiny_cameras
from tests.support.tracks import add_tracks


def scores(*decibels: float, fitted: float | None = None) -> EvaluationResult:
    return EvaluationResult(
        tuple(ViewScore(f"{value}.png", 0.1, value, 0.9, fitted) for value in decibels)
    )


@dataclass(frozen=True)
class Views:
    """The part of a scene that an evaluation reads."""

    test_cameras: Sequence[Camera]
    train_cameras: Sequence[Camera]
    observations: Observations | None = None
    dropped_test_cameras: Sequence[Camera] = ()


def views_of(test_cameras, train_cameras, **more) -> Views:
    return Views(test_cameras, train_cameras, **more)


def observations(camera, depths) -> Observations:
    """Points on the axis of a camera."""
    view = np.array([[0.0, 0.0, depth] for depth in depths])
    points = (view - camera.translation) @ camera.rotation
    n = len(points)
    return Observations(
        points.astype(np.float32),
        np.ones(n, np.float32),
        np.full(n, 3, np.int32),
        {camera.name: np.arange(n, dtype=np.int32)},
    )


def test_observed_points_have_their_depth_and_pixel():
    camera = tiny_cameras(1)[0]
    seen = observations(camera, [2.0, 3.5, -1.0]).seen(camera)
    assert seen.depths.tolist() == pytest.approx([2.0, 3.5], abs=1e-5)
    assert seen.pixels.tolist() == [pytest.approx([camera.cx, camera.cy], abs=1e-3)] * 2
    assert seen.depths.min() == pytest.approx(2.0, abs=1e-5)


def test_a_photograph_without_points_has_none():
    camera = tiny_cameras(1)[0]
    known = observations(camera, [2.0])
    assert known.seen(replace(camera, name="other")) is None
    assert known.only(["other"]).seen(camera) is None
    assert observations(camera, [-1.0]).seen(camera) is None


def test_fog_is_what_lies_in_front_of_the_nearest_point():
    alpha = torch.tensor([[1.0, 1.0, 0.8, 0.4]])
    depth = torch.tensor([[1.0, 1.9, 0.8, 0.1]])
    # Depths of 1 and 1 are in front of 2, 1.9 is within the margin, the last one is not solid.
    assert floater_share(depth, alpha, 2.0) == 0.5
    assert floater_share(depth, alpha, 0.5) == 0.0


class Wall:
    """A stage that renders a plane at one depth."""

    components = ()
    changes_exposure = False
    fits_held_out_poses = False

    def __init__(self, depth: float) -> None:
        self.depth = depth

    def render(self, camera, *, geometry):
        size = (camera.height, camera.width)
        depth = torch.full(size, self.depth) if geometry else None
        return SimpleNamespace(
            image=torch.full((*size, 3), 0.5), depth=depth, alpha=torch.ones(size)
        )


@pytest.mark.parametrize(("depth", "share"), [(1.0, 1.0), (2.0, 0.0)])
def test_held_out_views_say_how_much_is_fog(depth, share):
    held_out, *rest = tiny_cameras(12)
    scene = views_of([held_out], rest, observations=observations(held_out, [2.0]))
    found = find(Wall(depth), scene, lambda c: torch.zeros(48, 64, 3, dtype=torch.uint8))
    assert found.floaters == share
    assert len(found.training.per_view) == 8
    assert "Test/floaters" in [tag for tag, _, _ in found.values()]
    assert any(line.startswith("floaters: ") for line in found.lines(""))


def test_without_tracks_nothing_is_said_about_fog():
    cameras = tiny_cameras(4)
    scene = views_of(cameras[:1], cameras[1:])
    found = find(Wall(1.0), scene, lambda c: torch.zeros(48, 64, 3).byte())
    assert found.floaters is None
    assert "floater share" not in found.record()


def test_held_out_views_that_contradict_the_rest_are_measured_beside_the_others():
    cameras = tiny_cameras(6)
    black = torch.zeros(48, 64, 3, dtype=torch.uint8)
    white = torch.full_like(black, 255)

    def image_of(camera):
        return white if camera.name == cameras[1].name else black

    scene = views_of(cameras[:1], cameras[2:], dropped_test_cameras=cameras[1:2])
    found = find(Wall(1.0), scene, image_of)
    alone = find(Wall(1.0), replace(scene, dropped_test_cameras=()), image_of)
    assert found.held_out == alone.held_out
    assert [view.name for view in found.with_dropped.per_view] == [c.name for c in cameras[:2]]
    assert "held-out PSNR with dropped views" in found.record() or found.with_dropped.psnr > 1e3
    assert any("2 held-out views with those that contradict" in line for line in found.lines(""))
    assert alone.with_dropped is None


def test_a_large_gap_is_named_with_advice():
    assert Findings(scores(25.0), scores(27.0)).advice() is None
    assert Findings(None, scores(27.0)).advice() is None
    finding, advice = Findings(scores(17.0), scores(29.0)).advice()
    assert "12.0 dB" in finding
    assert "--exposure_compensation" in advice
    assert "--robust" not in advice
    assert "--robust" in Findings(scores(17.0), scores(29.0), floaters=0.3).advice()[1]
    # What exposures explain is no gap.
    assert Findings(scores(17.0, fitted=28.0), scores(25.0, fitted=29.0)).advice() is None


def test_the_photographs_that_fit_worst_come_first():
    found = Findings(scores(25.0, 12.0, 31.0), scores(14.0, 35.0))
    assert [score.name for score in found.worst()] == ["12.0.png", "14.0.png", "25.0.png"]
    assert found.record()["worst photographs"] == {
        "12.0.png": 12.0,
        "14.0.png": 14.0,
        "25.0.png": 25.0,
    }
    assert Findings(scores(float("inf"))).record() == {
        "held-out L1": 0.1,
        "held-out SSIM": 0.9,
        "worst photographs": {},
    }


def test_tracks_of_a_model_are_read(tmp_path):
    scene = make_tiny_scene(tmp_path / "scene", n_views=3, n_points=4)
    folder = tmp_path / "scene" / "sparse" / "0"
    add_tracks(folder, 2, ("view_00.png", "view_02.png"))
    images = ImageFolder(scene.root / "images", recursive=True)
    found = read_colmap(folder, images).observations
    assert found.rows.keys() == {"view_00.png", "view_02.png"}
    assert found.rows["view_00.png"].tolist() == found.rows["view_02.png"].tolist() == [0, 1]
    assert found.lengths.tolist()[:2] == [2, 2]
    assert np.isfinite(found.errors).all()


@pytest.mark.parametrize(
    ("depths", "last"),
    [
        ([1.0] * 50 + [2.0] * 50, 2.0),
        ([1.0] * 99 + [9.0], 1.0),
        ([1.0] * 50 + [200.0] * 50, 3.0),
        ([0.0] * 60 + [float("inf")] * 20 + [2.0] * 15 + [4.0] * 5, 4.0),
        ([0.0] * 4, 1.0),
    ],
    ids=["all", "a stray Gaussian", "a shell far behind", "pixels without depth", "none"],
)
def test_the_last_colour_is_far_but_leaves_what_is_near_to_be_seen(depths, last):
    assert depth_range(torch.tensor(depths)[None]).far == last


def test_depths_have_colours_from_near_to_far_whatever_a_few_pixels_show():
    depths = torch.linspace(5.0, 5.5, 100).view(10, 10)
    depths[0, 0] = 0.01
    depths[9, 9] = 1_000.0
    picture = depth_picture(depths)
    assert len(picture.view(-1, 3).unique(dim=0)) > 90
    assert tuple(picture[0, 0].tolist()) == DEPTH_COLORS[0]
    assert tuple(picture[9, 9].tolist()) == DEPTH_COLORS[-1]
    # The middle of the range has the middle colour.
    middle = depth_picture(torch.tensor([[1.0, 2.0, 3.0]]), DepthRange(1.0, 3.0))[0, 1]
    assert tuple(middle.tolist()) == DEPTH_COLORS[len(DEPTH_COLORS) // 2]


@pytest.mark.parametrize("missing", [0.0, float("inf"), float("nan")])
def test_pixels_without_a_depth_are_white_and_one_depth_is_one_colour(missing):
    picture = depth_picture(torch.tensor([[missing, 2.0, 2.0]]))
    assert picture[0].tolist() == [[255, 255, 255], [*DEPTH_COLORS[0]], [*DEPTH_COLORS[0]]]
