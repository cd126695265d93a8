# SPDX-License-Identifier: Apache-2.0
"""The page of a running training: its model, how far it is, and a button to make it wait."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gaussian_splatting.data.cameras import Camera, camera_extent, middle_of
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.upright import up_direction
from gaussian_splatting.viewing.browser_views import Wishes
from gaussian_splatting.viewing.live_view import LIVE_PICTURES, LiveView
from gaussian_splatting.viewing.page_server import (
    add_frustum,
    address,
    follow_browsers,
    open_server,
    selected_option,
    show_picture,
    stand_at,
)
from gaussian_splatting.viewing.viewer_flags import ViewerOptions
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.process_group import ProcessGroup

if TYPE_CHECKING:
    import viser

LONGEST_SIDE = 800
_MOST_FRUSTA = 100
_FRUSTUM_SHARE = 0.04
"""Size of a camera's pyramid, of the extent of the capture."""


class TrainingPage:
    """A :class:`~gaussian_splatting.viewing.live_view.LivePage` served by viser.

    Args:
        server: The page, still empty.
        title: What trains.
        last: Its last iteration.
        scene: The capture.
        may_pause: Whether to offer a pause.
    """

    def __init__(
        self, server: viser.ViserServer, title: str, last: int, scene: Scene, may_pause: bool
    ) -> None:
        self._server, self._title, self._last = server, title, last
        self.wishes = Wishes(LONGEST_SIDE)
        self.paused, self.shows = False, "image"
        cameras = scene.train_cameras
        turns = np.stack([camera.rotation for camera in cameras])
        first = cameras[0]
        distance = float(np.linalg.norm(first.center - middle_of(cameras)))
        up = up_direction(turns, scene.points)
        stand_at(server, first, up, max(distance, 1e-3))
        self._words = server.gui.add_markdown(f"**{title}** begins ...")
        if may_pause:
            self._add_pause()
        self._add_choice()
        self._add_cameras(cameras)
        follow_browsers(server, self.wishes)

    def picture(self, client: int, picture: np.ndarray) -> None:
        """Send a picture to a browser. (H, W, 3) uint8"""
        show_picture(self._server, client, picture)

    def tell(self, iteration: int, gaussians: int, terms: Mapping[str, float]) -> None:
        """Say how far the training is."""
        rows = "\n".join(f"| {name} | {value:.5f} |" for name, value in terms.items())
        self._words.content = (
            f"**{self._title}**: iteration {iteration:,} of {self._last:,}, {gaussians:,} "
            f"Gaussians\n\n| term | value |\n|---|--:|\n{rows}"
        )

    def close(self) -> None:
        """Stop serving."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._server.stop()

    def _add_pause(self) -> None:
        button = self._server.gui.add_button("Pause")

        @button.on_click
        def _(_: object) -> None:
            self.paused = not self.paused
            button.label = "Go on" if self.paused else "Pause"
            self.wishes.wake()

    def _add_choice(self) -> None:
        choice = self._server.gui.add_dropdown("Show", tuple(LIVE_PICTURES))

        @choice.on_update
        def _(_: object) -> None:
            self.shows = selected_option(choice)
            self.wishes.renew()

    def _add_cameras(self, cameras: Sequence[Camera]) -> None:
        size = _FRUSTUM_SHARE * max(camera_extent(cameras), 1e-3)
        stride = -(-len(cameras) // _MOST_FRUSTA)
        frusta = [
            add_frustum(self._server, f"/cameras/{number}", camera, size)
            for number, camera in enumerate(cameras[::stride])
        ]
        for frustum in frusta:
            frustum.visible = False
        box = self._server.gui.add_checkbox("Cameras", False)

        @box.on_update
        def _(_: object) -> None:
            for frustum in frusta:
                frustum.visible = box.value


def open_live_view(
    options: ViewerOptions, title: str, last: int, scene: Scene, group: ProcessGroup, say: Console
) -> LiveView:
    """The page that was asked for; nothing is served where none was, or where it cannot be.

    Args:
        options: The flags.
        title: What trains.
        last: Its last iteration.
        scene: The capture.
        group: The processes that train together; the first one serves.
        say: Told where to look, or why nothing is shown.
    """
    if options.viewer is None or not group.is_first:
        return LiveView(None, say.warn)
    page = _page(options, title, last, scene, group.is_alone, say.warn)
    if page is not None:
        say.info(f"viewer: {address(options.viewer_host, options.viewer)}")
    return LiveView(page, say.warn, group.is_alone)


def _page(
    options: ViewerOptions,
    title: str,
    last: int,
    scene: Scene,
    may_pause: bool,
    warn: Callable[[str], None],
) -> TrainingPage | None:
    """The page, or a warning: a run of hours must not fail for it."""
    try:
        server = open_server(options.viewer_host, options.viewer, "SuGaR trainer", "--viewer")
        return TrainingPage(server, title, last, scene, may_pause)
    except UserError as error:
        warn(f"no viewer: {error}; training goes on")
    except Exception as error:
        warn(f"no viewer ({type(error).__name__}: {error}); training goes on")
    return None
