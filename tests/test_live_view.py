# SPDX-License-Identifier: Apache-2.0
"""A training that is watched: the same bits, a bounded share of time, and never an end for it."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from gaussian_splatting.data.cameras import pixel_rays
from gaussian_splatting.engine.observer import ObservedRun, ViewerOptions
from gaussian_splatting.engine.reporting.view_pictures import LIVE_PICTURES
from gaussian_splatting.engine.runner import RunOptions
from sugar_utils.console import Console
from sugar_utils.process_group import ALONE
from sugar_viewer import live_view
from sugar_viewer.live_view import SHARE, LiveView, open_live_view
from sugar_viewer.page_server import (
    REST_SECONDS,
    SMALLEST_SIDE,
    BrowserView,
    RenderQueue,
)
from tests.support.command_line import free_port
from tests.support.tiny_scene import TinyScene, assert_same_bits, tiny_cameras
from tests.test_resume import Kind, coarse, refine, vanilla

UPRIGHT = np.array([1.0, 0.0, 0.0, 0.0])


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(x: float = 0.0) -> BrowserView:
    return BrowserView(np.array([x, 0.0, -3.0]), UPRIGHT, math.radians(60), 1200, 800)


class EagerPage:
    """A page whose browser wants another picture, of another kind, after every iteration."""

    def __init__(self) -> None:
        self.requests, self.paused, self.shows = RenderQueue(64), False, "image"
        self.requests.looks(1, view())
        self.pictures: list[np.ndarray] = []
        self.told: list[int] = []
        self.closed = False

    def picture(self, client: int, picture: np.ndarray) -> None:
        self.pictures.append(picture)
        names = list(LIVE_PICTURES)
        self.shows = names[len(self.pictures) % len(names)]
        self.requests.renew()

    def tell(self, iteration: int, gaussians: int, terms: Mapping[str, float]) -> None:
        self.told.append(iteration)

    def close(self) -> None:
        self.closed = True


class BrokenPage(EagerPage):
    """A page that fails when it is to show something."""

    def picture(self, client: int, picture: np.ndarray) -> None:
        raise ConnectionError("gone")


@pytest.fixture(params=["vanilla", "coarse", "refine"])
def kind(request, scene, checkpoint) -> Kind:
    if request.param == "vanilla":
        return vanilla(scene, 13, 13)
    if request.param == "refine":
        return refine(scene, checkpoint, 8, 8)
    return coarse(scene, checkpoint, 0.003, "dn_consistency", (31, 45))


def watched_by(monkeypatch, page: EagerPage) -> None:
    """All runs of this test are shown on this page, with a clock that lets all pictures be made."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(live_view, "SHARE", 1.0)
    monkeypatch.setattr(
        live_view,
        "open_live_view",
        lambda run: LiveView(page, run.console.warn, clock=lambda: float(1000 * next(ticks))),
    )


@pytest.mark.slow
def test_a_watched_run_has_the_bits_of_one_that_nobody_watches(kind, tmp_path, monkeypatch):
    assert kind.run(tmp_path / "alone") == 0
    page = EagerPage()
    with monkeypatch.context() as patched:
        watched_by(patched, page)
        assert kind.run(tmp_path / "watched") == 0
    assert len(page.pictures) >= 6
    assert len({picture.tobytes() for picture in page.pictures}) >= 3
    assert page.closed
    names = [
        folder / kind.folder / f"{kind.last}.pt"
        for folder in (tmp_path / "alone", tmp_path / "watched")
    ]
    assert_same_bits(*names)


def test_a_viewer_that_fails_does_not_end_the_run(scene, tmp_path, monkeypatch, capsys):
    page = BrokenPage()
    watched_by(monkeypatch, page)
    run = vanilla(scene, 13, 13)
    assert run.run(tmp_path) == 0
    told = capsys.readouterr()
    assert told.out.count("the viewer stopped (ConnectionError: gone); training goes on") == 1
    assert told.err == ""
    assert page.closed
    assert (tmp_path / run.folder / "13.pt").is_file()


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_in_one_line_and_the_run_goes_on(scene, tmp_path, capsys):
    pytest.importorskip("viser")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = vanilla(scene, 4, 4, "--viewer", port, "--viewer_host", "127.0.0.1")
        assert run.run(tmp_path) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len([line for line in warnings if f"no viewer: port {port} of 127.0.0.1" in line]) == 1


def test_the_page_opens_and_closes_with_the_run_and_is_no_part_of_its_identity(
    scene, tmp_path, capsys
):
    pytest.importorskip("viser")
    port = free_port()
    shown = vanilla(scene, 4, 2, "--viewer", port, "--viewer_host", "127.0.0.1")
    assert shown.run(tmp_path) == 0
    out = capsys.readouterr().out
    assert f"viewer: http://127.0.0.1:{port}" in out
    assert "viser" not in out.replace(str(tmp_path), "")
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))
    assert vanilla(scene, 4, 2).run(tmp_path) == 0
    assert "finished already" in capsys.readouterr().out


def test_only_the_first_process_serves_and_only_where_asked():
    follower = SimpleNamespace(is_first=False, is_alone=False)
    for options, who in ((ViewerOptions(), ALONE), (ViewerOptions(free_port()), follower)):
        live = open_live_view(ObservedRun(None, None, 3, options, who, Console.silent()))
        # No scene is looked at, so no page was made.
        live.after_step(None, 1, {}, lambda: None)
    assert RunOptions().watching == ViewerOptions(None, "localhost")


class CountingStage:
    """A stage whose renders take a second of a clock."""

    def __init__(self, clock: Clock, scene: TinyScene) -> None:
        self.clock, self.renders = clock, 0
        self.model = _Sized(torch.device("cpu"))

    def render(self, camera, *, geometry):
        self.renders += 1
        self.clock.now += 1.0
        return SimpleNamespace(image=torch.zeros(camera.height, camera.width, 3))


class _Sized:
    def __init__(self, device) -> None:
        self.device = device

    def __len__(self) -> int:
        return 1


class PlainPage(EagerPage):
    """A page whose browser is content with a picture until the model changes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.requests = RenderQueue(64, clock)
        self.requests.looks(1, view())

    def picture(self, client: int, picture: np.ndarray) -> None:
        self.pictures.append(picture)


def test_nobody_is_shown_nothing_and_nothing_is_read(scene):
    page = EagerPage()
    page.requests.leaves(1)
    live = LiveView(page, print)
    # Neither the stage nor the terms are looked at.
    live.after_step(None, 1, None, None)
    assert page.pictures == page.told == []


def test_pictures_take_a_bounded_share_of_the_time(scene):
    clock = Clock()
    stage, page = CountingStage(clock, scene), PlainPage(clock)
    live = LiveView(page, print, clock=clock)
    begin = clock.now
    for iteration in range(400):
        clock.now += 0.05
        live.after_step(stage, iteration, {"loss": torch.tensor(0.5)}, lambda: False)
    share = stage.renders / (clock.now - begin)
    assert 0.8 * SHARE < share < 1.2 * SHARE


@pytest.mark.parametrize("end", ["button", "stop", "left"])
def test_a_pause_ends_by_its_button_by_a_stop_or_when_nobody_is_left(end, scene):
    clock = Clock()
    stage, page = CountingStage(clock, scene), PlainPage(clock)
    page.paused, rounds = True, []

    def wait(seconds: float) -> None:
        rounds.append(seconds)
        clock.now += seconds
        if len(rounds) == 5:
            page.paused = end != "button"
            if end == "left":
                page.requests.leaves(1)

    page.requests.wait = wait
    live = LiveView(page, print, clock=clock)
    live.after_step(stage, 7, {}, lambda: end == "stop" and len(rounds) >= 5)
    assert len(rounds) == 5
    # While it waits, the picture is finished in full size and then left alone.
    assert 1 <= len(page.pictures) <= 2


def test_several_processes_do_not_pause(scene):
    clock = Clock()
    stage, page = CountingStage(clock, scene), PlainPage(clock)
    page.paused = True
    LiveView(page, print, may_pause=False, clock=clock).after_step(stage, 7, {}, lambda: False)
    assert page.told == [7]


def test_a_moving_browser_gets_small_pictures_and_a_resting_one_a_large_one():
    clock = Clock()
    requests = RenderQueue(1000, clock)
    assert requests.due() is None
    requests.looks(3, view())
    requests.looks(3, view(1.0))
    small = requests.due()
    assert small.client == 3
    assert small.view.position[0] == 1.0
    assert small.longest_side < 1000
    requests.made(small, 0.01)
    assert requests.due() is None
    clock.now += 1.01 * REST_SECONDS
    large = requests.due()
    assert large.longest_side == 1000
    assert (large.camera.width, large.camera.height) == (1000, 667)
    requests.made(large, 0.5)
    assert requests.due() is None
    requests.renew()
    assert requests.due().longest_side == 1000
    requests.leaves(3)
    assert requests.due() is None
    assert len(requests) == 0


def test_the_size_of_moving_pictures_follows_from_the_time_that_pictures_take():
    clock = Clock()
    requests = RenderQueue(1000, clock)
    sides = []
    for seconds in (1e-3, 100.0):
        for _ in range(6):
            requests.looks(1, view(clock.now))
            request = requests.due()
            requests.made(request, seconds)
        sides.append(request.longest_side)
    assert sides == [1000, SMALLEST_SIDE]


def test_a_picture_of_an_outdated_view_does_not_count_as_the_new_one():
    requests = RenderQueue(1000, Clock())
    requests.looks(1, view())
    old = requests.due()
    requests.looks(1, view(2.0))
    requests.made(old, 0.01)
    assert requests.due().view.position[0] == 2.0


def test_browsers_take_turns():
    clock = Clock()
    requests = RenderQueue(1000, clock)
    served = []
    for _ in range(6):
        for client in (1, 2, 3):
            requests.looks(client, view())
        request = requests.due()
        clock.now += 0.01
        requests.made(request, 0.01)
        served.append(request.client)
    assert sorted(served) == [1, 1, 2, 2, 3, 3]


def test_the_camera_of_a_browser_sees_what_the_browser_sees():
    truth = tiny_cameras()[3]
    wxyz = np.roll(Rotation.from_matrix(truth.rotation.T).as_quat(), 1)
    fov = 2 * math.atan(200 / (2 * 150.0))
    camera = BrowserView(truth.center, wxyz, fov, 300, 200).camera(300)
    np.testing.assert_allclose(camera.rotation, truth.rotation, atol=1e-12)
    np.testing.assert_allclose(camera.center, truth.center, atol=1e-12)
    assert (camera.fx, camera.fy, camera.cx, camera.cy) == pytest.approx((150, 150, 150, 100))
    small = BrowserView(truth.center, wxyz, fov, 300, 200).camera(30)
    corner = pixel_rays(small, dtype=torch.float64, device="cpu")[0, 0]
    assert float(corner[0] / corner[2]) == pytest.approx(-(150 - 5) / 150)
