# SPDX-License-Identifier: Apache-2.0
"""Live view of a running training, rendered by the thread that trains, between its iterations.

Whatever fails here ends the showing and not the training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gaussian_splatting.core.subsets import at_most
from gaussian_splatting.data.cameras import Camera, camera_extent, middle_of, up_direction
from gaussian_splatting.engine.observer import ObservedRun
from gaussian_splatting.engine.reporting.view_pictures import LIVE_PICTURES
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.errors import Notify, UserError
from sugar_utils.memory import release_cached
from sugar_viewer import page_server as pages

if TYPE_CHECKING:
    import viser

SHARE = 0.25  # of the time, at most, that goes into pictures while training goes on
RENEW_SECONDS = 1.0  # how old a picture may get while the model behind it changes
TELL_SECONDS = 0.5

_GEOMETRY = ("depth", "normal")

LONGEST_SIDE = 800
_MOST_FRUSTA = 100
_FRUSTUM_SHARE = 0.04  # size of a camera's pyramid, of the extent of the capture


class LiveView(contextlib.AbstractContextManager):
    """Viewer that the training loop calls after every iteration; a context manager.

    Without a page nothing is shown; ``may_pause`` says whether the training may be made to wait.
    """

    def __init__(
        self,
        page: TrainingPage | None,
        warn: Notify,
        may_pause: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page = page
        self._warn = warn
        self._may_pause = may_pause
        self._clock = clock
        self._next_picture = self._next_words = self._next_renewal = -float("inf")

    def __exit__(self, *exception: object) -> None:
        self._close()

    def after_step(
        self,
        stage: Stage,
        iteration: int,
        terms: Mapping[str, Tensor],
        stopped: Callable[[], object],
    ) -> None:
        """Show the model as it is now, if anybody looks and a picture is due."""
        page = self._page
        if page is None or not len(page.requests):
            return
        try:
            now = self._clock()
            if now >= self._next_words:
                figures = {name: float(value) for name, value in terms.items()}
                page.tell(iteration, len(stage.model), figures)
                self._next_words = now + TELL_SECONDS
            if now >= self._next_renewal:
                page.requests.renew()
                self._next_renewal = now + RENEW_SECONDS
            if now >= self._next_picture:
                took = self._render(page, stage)
                self._next_picture = self._clock() + took * (1 / SHARE - 1)
            while self._may_pause and page.paused and len(page.requests) and not stopped():
                # No iteration waits, so there is time for all pictures.
                if not self._render(page, stage):
                    page.requests.wait(0.05)
        except Exception as error:
            # A lack of memory for a picture, a page that broke: the run is worth more than both.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self._warn(f"the viewer stopped ({reason}); training goes on")
            self._close()
            release_cached(stage.model.device)

    def _render(self, page: TrainingPage, stage: Stage) -> float:
        request = page.requests.due()
        if request is None:
            return 0.0
        begun = self._clock()
        shows = page.shows
        output = stage.render(request.camera, geometry=shows in _GEOMETRY)
        page.picture(request.client, LIVE_PICTURES[shows](output).cpu().numpy())
        seconds = self._clock() - begun
        page.requests.made(request, seconds)
        return seconds

    def _close(self) -> None:
        page = self._page
        self._page = None
        if page is None:
            return
        try:
            page.close()
        except Exception as error:
            self._warn(f"the viewer did not end in order ({type(error).__name__}: {error})")


class TrainingPage:
    """A page that shows the training, served by viser; ``shows`` is a key of ``LIVE_PICTURES``."""

    def __init__(
        self, server: viser.ViserServer, title: str, last: int, scene: Scene, may_pause: bool
    ) -> None:
        self._server = server
        self._title = title
        self._last = last
        self.requests = pages.RenderQueue(LONGEST_SIDE)
        self.paused = False
        self.shows = "image"
        cameras = scene.train_cameras
        turns = np.stack([camera.rotation for camera in cameras])
        first = cameras[0]
        distance = float(np.linalg.norm(first.center - middle_of(cameras)))
        up = up_direction(turns, scene.points)
        pages.stand_at(server, first, up, max(distance, 1e-3))
        self._words = server.gui.add_markdown(f"**{title}** begins ...")
        if may_pause:
            self._add_pause()
        self._add_choice()
        self._add_cameras(cameras)
        pages.follow_browsers(server, self.requests)

    def picture(self, client: int, picture: np.ndarray) -> None:
        """Send a picture to a browser. (H, W, 3) uint8"""
        pages.show_picture(self._server, client, picture)

    def tell(self, iteration: int, gaussians: int, terms: Mapping[str, float]) -> None:
        """Show the iteration, the number of Gaussians and the loss terms."""
        rows = "\n".join(f"| {name} | {value:.5f} |" for name, value in terms.items())
        self._words.content = (
            f"**{self._title}**: iteration {iteration:,} of {self._last:,}, {gaussians:,} "
            f"Gaussians\n\n| term | value |\n|---|--:|\n{rows}"
        )

    def close(self) -> None:
        """Stop the server."""
        pages.stop(self._server)

    def _add_pause(self) -> None:
        button = self._server.gui.add_button("Pause")

        @button.on_click
        def _(_: object) -> None:
            self.paused = not self.paused
            button.label = "Go on" if self.paused else "Pause"
            self.requests.wake()

    def _add_choice(self) -> None:
        choice = self._server.gui.add_dropdown("Show", tuple(LIVE_PICTURES))

        @choice.on_update
        def _(_: object) -> None:
            self.shows = pages.selected_option(choice)
            self.requests.renew()

    def _add_cameras(self, cameras: Sequence[Camera]) -> None:
        size = _FRUSTUM_SHARE * max(camera_extent(cameras), 1e-3)
        frusta = [
            pages.add_frustum(self._server, f"/cameras/{number}", camera, size)
            for number, camera in enumerate(at_most(cameras, _MOST_FRUSTA))
        ]
        for frustum in frusta:
            frustum.visible = False
        box = self._server.gui.add_checkbox("Cameras", False)

        @box.on_update
        def _(_: object) -> None:
            for frustum in frusta:
                frustum.visible = box.value


def open_live_view(run: ObservedRun) -> LiveView:
    """The page that was asked for; nothing is served where none was, or where it cannot be."""
    console = run.console
    address = run.viewer
    if address.viewer is None or not run.group.is_first:
        return LiveView(None, console.warn)
    page = None
    # A run of hours must not fail for it.
    try:
        server = pages.open_server(address.viewer_host, address.viewer, "SuGaR trainer", "--viewer")
        page = TrainingPage(
            server, run.stage.name, run.last_iteration, run.scene, run.group.is_alone
        )
    except UserError as error:
        console.warn(f"no viewer: {error}; training goes on")
    except Exception as error:
        console.warn(f"no viewer ({type(error).__name__}: {error}); training goes on")
    else:
        console.headline(f"viewer: {pages.address(address.viewer_host, address.viewer)}")
    return LiveView(page, console.warn, run.group.is_alone)
