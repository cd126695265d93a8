# SPDX-License-Identifier: Apache-2.0
"""A running training shown to whoever looks: between its iterations, at a bounded share of time.

Pictures are rendered by the thread that trains, so the model needs no locks and nothing of it is
copied. Whatever fails here ends the showing and not the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from gaussian_splatting.engine.reporting.image_metrics import to_uint8
from gaussian_splatting.engine.reporting.view_pictures import (
    depth_picture,
    farthest,
    grey_picture,
    normal_picture,
)
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.rasterization import RenderOutput
from gaussian_splatting.viewing.browser_views import Wishes
from sugar_utils.memory import release_cached

SHARE = 0.25
"""Of the time, at most, that goes into pictures while training goes on."""

RENEW_SECONDS = 1.0
"""How old a picture may get while the model behind it changes."""

TELL_SECONDS = 0.5
_PAUSED_SECONDS = 0.05

LIVE_PICTURES: dict[str, Callable[[RenderOutput], Tensor]] = {
    "image": lambda output: to_uint8(output.image),
    "depth": lambda output: depth_picture(output.depth, farthest(output.depth)),
    "normal": lambda output: normal_picture(output.normal),
    "alpha": lambda output: grey_picture(output.alpha),
}
"""What can be shown of a render. (H, W, 3) uint8"""

_GEOMETRY = ("depth", "normal")


class LivePage(Protocol):
    """The page, as the training sees it.

    Attributes:
        wishes: The pictures that browsers wait for.
        paused: Whether somebody asked the training to wait.
        shows: A key of ``LIVE_PICTURES``.
    """

    wishes: Wishes
    paused: bool
    shows: str

    def picture(self, client: int, picture: np.ndarray) -> None:
        """Send a picture to a browser. (H, W, 3) uint8"""
        ...

    def tell(self, iteration: int, gaussians: int, terms: Mapping[str, float]) -> None:
        """Say how far the training is."""
        ...

    def close(self) -> None:
        """Stop serving."""
        ...


class LiveView:
    """What the training loop calls after every iteration; a context manager.

    Args:
        page: Where to show it; None shows nothing.
        warn: Told why the showing ended.
        may_pause: Whether the training may be made to wait; several processes may not, because the
            others would take the first for lost.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        page: LivePage | None,
        warn: Callable[[str], None],
        may_pause: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page, self._warn, self._may_pause, self._clock = page, warn, may_pause, clock
        self._next_picture = self._next_words = self._next_renewal = -float("inf")

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def after_step(
        self,
        stage: Stage,
        iteration: int,
        terms: Mapping[str, Tensor],
        stopped: Callable[[], object],
    ) -> None:
        """Show the model as it is now, if anybody looks and a picture is due.

        Args:
            stage: What trains.
            iteration: The one that is done.
            terms: Its loss terms, on the device.
            stopped: Whether the run was asked to stop, which ends a pause.
        """
        if self._page is None or not len(self._page.wishes):
            return
        try:
            self._serve(self._page, stage, iteration, terms, stopped)
        except Exception as error:
            # A lack of memory for a picture, a page that broke: the run is worth more than both.
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self._warn(f"the viewer stopped ({reason}); training goes on")
            self._close()
            release_cached(stage.model.device)

    def _serve(
        self,
        page: LivePage,
        stage: Stage,
        iteration: int,
        terms: Mapping[str, Tensor],
        stopped: Callable[[], object],
    ) -> None:
        now = self._clock()
        if now >= self._next_words:
            figures = {name: float(value) for name, value in terms.items()}
            page.tell(iteration, len(stage.model), figures)
            self._next_words = now + TELL_SECONDS
        if now >= self._next_renewal:
            page.wishes.renew()
            self._next_renewal = now + RENEW_SECONDS
        if now >= self._next_picture:
            took = self._render(page, stage)
            self._next_picture = self._clock() + took * (1 / SHARE - 1)
        while self._may_pause and page.paused and len(page.wishes) and not stopped():
            # Nobody waits for the next iteration, so there is time for all pictures.
            if not self._render(page, stage):
                page.wishes.wait(_PAUSED_SECONDS)

    def _render(self, page: LivePage, stage: Stage) -> float:
        """Make the picture that is due; the seconds it took, 0 if none is."""
        wish = page.wishes.due()
        if wish is None:
            return 0.0
        begun, shows = self._clock(), page.shows
        output = stage.render(wish.camera, geometry=shows in _GEOMETRY)
        page.picture(wish.client, LIVE_PICTURES[shows](output).cpu().numpy())
        seconds = self._clock() - begun
        page.wishes.made(wish, seconds)
        return seconds

    def _close(self) -> None:
        page, self._page = self._page, None
        if page is None:
            return
        try:
            page.close()
        except Exception as error:
            self._warn(f"the viewer did not end in order ({type(error).__name__}: {error})")
