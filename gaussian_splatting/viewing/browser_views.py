# SPDX-License-Identifier: Apache-2.0
"""What browsers look at, and which picture each of them waits for: small ones while it moves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.spatial.transform import Rotation

from gaussian_splatting.data.cameras import Camera

REST_SECONDS = 0.3
"""A camera that has not moved for so long is looked through in full size."""

MOVING_SECONDS = 0.12
"""What a picture may take while the camera moves."""

SMALLEST_SIDE = 96
_FIRST_SIDE = 256


@dataclass(frozen=True, eq=False)
class BrowserView:
    """Where a browser looks from.

    Attributes:
        position: Of the camera, in world units. (3,)
        wxyz: Quaternion from the camera's axes (x right, y down, z forward) to the world's. (4,)
        fov: Vertical field of view in radians.
        width: Of what shows the picture, in pixels.
        height: Likewise.
    """

    position: np.ndarray
    wxyz: np.ndarray
    fov: float
    width: int
    height: int

    def camera(self, longest_side: int) -> Camera:
        """The camera to render with, no side longer than so many pixels."""
        scale = min(1.0, longest_side / max(self.width, self.height))
        width, height = (max(1, round(side * scale)) for side in (self.width, self.height))
        focal = height / (2 * math.tan(self.fov / 2))
        rotation = Rotation.from_quat(np.roll(self.wxyz, -1)).as_matrix().T
        return Camera(
            "browser", width, height, focal, focal, width / 2, height / 2,
            rotation, -rotation @ np.asarray(self.position, dtype=np.float64),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Wish:
    """A picture that a browser waits for.

    Attributes:
        client: Which browser.
        view: From where.
        longest_side: In pixels.
        version: What of the browser's state it shows.
    """

    client: int
    view: BrowserView
    longest_side: int
    version: int

    @property
    def camera(self) -> Camera:
        """What to render with."""
        return self.view.camera(self.longest_side)


@dataclass
class _Client:
    view: BrowserView
    moved_at: float
    version: int = 1
    shown_version: int = 0
    shown_side: int = 0
    shown_at: float = field(default=-math.inf)


class Wishes:
    """The pictures that browsers wait for; may be told and asked from any thread.

    Args:
        longest_side: Of pictures in full size, in pixels.
        clock: Monotonic seconds.
    """

    def __init__(
        self, longest_side: int = 1280, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._longest_side, self._clock = longest_side, clock
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._clients: dict[int, _Client] = {}
        self._moving_side = min(_FIRST_SIDE, longest_side)

    def __len__(self) -> int:
        """Browsers that look."""
        return len(self._clients)

    def looks(self, client: int, view: BrowserView) -> None:
        """A browser looks from somewhere, perhaps from somewhere else."""
        with self._lock:
            known = self._clients.get(client)
            if known is None:
                # It rests until it moves; its first picture is a small one all the same.
                self._clients[client] = _Client(view, self._clock())
            else:
                known.view, known.moved_at = view, self._clock()
                known.version += 1
        self._changed.set()

    def leaves(self, client: int) -> None:
        """A browser is gone."""
        with self._lock:
            self._clients.pop(client, None)

    def renew(self) -> None:
        """What is shown has changed: every browser waits for another picture."""
        with self._lock:
            for client in self._clients.values():
                client.version += 1
        self._changed.set()

    def due(self) -> Wish | None:
        """The picture to make next, of the browser that has waited longest; None if none is due."""
        with self._lock:
            now = self._clock()
            waiting = []
            for number, client in self._clients.items():
                resting = now - client.moved_at >= REST_SECONDS
                side = self._longest_side if resting else self._moving_side
                unfinished = resting and client.shown_side < side
                if client.shown_version != client.version or unfinished:
                    waiting.append((client.shown_at, number, side))
            if not waiting:
                return None
            _, number, side = min(waiting)
            client = self._clients[number]
            return Wish(number, client.view, side, client.version)

    def made(self, wish: Wish, seconds: float) -> None:
        """A picture was made and sent; its time decides the size of small ones.

        Args:
            wish: Which one.
            seconds: What it took.
        """
        with self._lock:
            # Time grows with the number of pixels, so a side with its root.
            fitting = wish.longest_side * math.sqrt(MOVING_SECONDS / max(seconds, 1e-6))
            self._moving_side = int(min(max(fitting, SMALLEST_SIDE), self._longest_side))
            client = self._clients.get(wish.client)
            if client is not None:
                client.shown_version, client.shown_side = wish.version, wish.longest_side
                client.shown_at = self._clock()

    def wait(self, seconds: float) -> None:
        """Sleep until something changes, at most so long."""
        self._changed.wait(seconds)
        self._changed.clear()

    def wake(self) -> None:
        """End :meth:`wait`."""
        self._changed.set()
