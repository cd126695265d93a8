# SPDX-License-Identifier: Apache-2.0
"""A page in the browser by the package viser: what browsers look at, and their pictures."""

from __future__ import annotations

import contextlib
import http
import inspect
import io
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from gaussian_splatting.data.cameras import REFERENCE_NEAR, Camera
from gaussian_splatting.engine.observer import LOCALHOST
from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import load_package
from sugar_utils.schemas import FAR
from sugar_viewer.page_corrections import correct_response

if TYPE_CHECKING:
    import viser

_EVERYWHERE = ("0.0.0.0", "::", "")
_LOCAL = (LOCALHOST, "127.0.0.1", "::1")
_FOV = (1e-3, 3.1)
_MOST_PIXELS = 1 << 20
"""Fields of view in radians, and pixels a side, that a browser may have."""
_NEAR_FACTOR = 10.0  # depth up to which Gaussians are culled, in near planes of the browser

REST_SECONDS = 0.3  # a camera that has not moved for so long is looked through in full size
MOVING_SECONDS = 0.12  # what a picture may take while the camera moves
SMALLEST_SIDE = 96
_FIRST_SIDE = 256


def load_viser() -> ModuleType:
    return load_package("the viewer", "viser", "viser")[0]


def open_server(host: str, port: int, label: str, flag: str = "--port") -> viser.ViserServer:
    module = load_viser()
    check_free(host, port, flag)
    # Its messages are for who writes programs with it.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), _guarded_pages(host):
        server = module.ViserServer(host=host, port=port, label=label, verbose=False)
    server.gui.configure_theme(control_width="large", show_share_button=False)
    return server


@contextlib.contextmanager
def _guarded_pages(host: str) -> Iterator[None]:
    """Servers that start in this context answer requests of other origins with 403.

    What they serve is corrected.
    """
    server = load_package("the viewer", "viser", "websockets.asyncio.server")[0]
    serve = server.serve

    def guarded(*arguments: Any, process_request: Callable[..., Any], **how: Any) -> Any:
        async def process(connection: Any, request: Any) -> Any:
            origin = request.headers.get("Origin")
            asked = request.headers.get("Host", "")
            own = urlsplit(origin or "").netloc == asked
            loopback = host not in _LOCAL or urlsplit(f"//{asked}").hostname in _LOCAL
            if origin is not None and not (own and loopback):
                return connection.respond(http.HTTPStatus.FORBIDDEN, "foreign origin\n")
            response = process_request(connection, request)
            if inspect.isawaitable(response):
                response = await response
            correct_response(response)
            return response

        return serve(*arguments, process_request=process, **how)

    server.serve = guarded
    try:
        yield
    finally:
        server.serve = serve


def address(host: str, port: int) -> str:
    """What to type into the browser on this machine."""
    return f"http://{LOCALHOST if host in _EVERYWHERE else host}:{port}"


def check_free(host: str, port: int, flag: str) -> None:
    """Check that a port can be had; viser would silently take the next one."""
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{host}: not an address of this machine ({error})") from error
    for family, kind, protocol, _, place in places[:1]:
        with socket.socket(family, kind, protocol) as probe:
            if os.name != "nt":
                # A port that was just left may be taken; on Windows it would mean any port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with explained(f"port {port} of {host} cannot be had", f"choose another with {flag}"):
                probe.bind(place)


def follow_browsers(server: viser.ViserServer, requests: RenderQueue) -> None:
    """Keep note of where all browsers look, and of which are there."""

    def follow(number: int, camera: Any) -> None:
        view = view_of(camera)
        if view is not None:
            requests.looks(number, view)

    @server.on_client_connect
    def _(client: Any) -> None:
        follow(client.client_id, client.camera)
        client.camera.on_update(lambda camera: follow(client.client_id, camera))

    @server.on_client_disconnect
    def _(client: Any) -> None:
        requests.leaves(client.client_id)


def view_of(camera: Any) -> BrowserView | None:
    """Where viser says that a browser looks from; None where it says what makes no picture."""
    try:
        position, wxyz = (np.array(part, float) for part in (camera.position, camera.wxyz))
        size = camera.image_width, camera.image_height
        width, height = (max(1, int(pixels)) for pixels in size)
        near = min(REFERENCE_NEAR, _NEAR_FACTOR * float(camera.near))
        view = BrowserView(position, wxyz, float(camera.fov), width, height, near)
    except (TypeError, ValueError, OverflowError):
        return None
    if (position.shape, wxyz.shape) != ((3,), (4,)) or not _FOV[0] <= view.fov <= _FOV[1]:
        return None
    usable = (np.abs(position) <= FAR).all() and 1e-6 <= np.abs(wxyz).max() <= FAR
    return view if usable and max(view.width, view.height) <= _MOST_PIXELS else None


def selected_option(choice: Any) -> str:
    """The selected option of a dropdown; the first one if a browser sent another text."""
    return choice.value if choice.value in choice.options else choice.options[0]


def show_picture(server: viser.ViserServer, client: int, picture: np.ndarray | None) -> None:
    """Put a picture, (H, W, 3) uint8, behind what a browser shows; None removes it."""
    there = server.get_clients().get(client)
    if there is not None:
        there.scene.set_background_image(picture, format="jpeg", jpeg_quality=90)


def stand_at(server: viser.ViserServer, camera: Camera, up: np.ndarray, distance: float) -> None:
    """Where browsers look from when they open the page.

    Args:
        up: What is up in the world. (3,)
        distance: From it to what the browser's camera turns around, in world units.
    """
    server.scene.set_up_direction(tuple(float(x) for x in up))
    start = server.initial_camera
    start.position = tuple(camera.center)
    start.look_at = tuple(camera.center + distance * camera.rotation[2])
    start.up = tuple(up)
    start.fov = 2 * math.atan(camera.tan_half_fov[1])
    start.near = distance / 1_000
    start.far = distance * 1_000


def turn_of(camera: Camera) -> np.ndarray:
    """From a camera's axes to the world's, as a quaternion wxyz. (4,)"""
    # Here and not above: trainings without a viewer start without it.
    from scipy.spatial.transform import Rotation

    return np.roll(Rotation.from_matrix(camera.rotation.T).as_quat(), 1)


def look_through(client: Any, camera: Camera) -> None:
    """Let a browser look from a camera, with the height of its view."""
    with client.atomic():
        client.camera.position = camera.center
        client.camera.wxyz = turn_of(camera)
        client.camera.fov = 2 * math.atan(camera.tan_half_fov[1])


def add_frustum(server: viser.ViserServer, name: str, camera: Camera, size: float) -> Any:
    """A camera of the capture as a pyramid; ``size`` in world units."""
    # viser reads a vertical field of view.
    return server.scene.add_camera_frustum(
        name,
        2 * math.atan(camera.tan_half_fov[1]),
        camera.width / camera.height,
        scale=size,
        thickness=1.5,
        thickness_units="screen",
        color=(90, 110, 140),
        wxyz=turn_of(camera),
        position=camera.center,
        cast_shadow=False,
        receive_shadow=False,
    )


@contextlib.contextmanager
def closing(server: viser.ViserServer) -> Iterator[viser.ViserServer]:
    """Stop a server at the end, whatever happened; its own words about that are not shown."""
    try:
        yield server
    finally:
        stop(server)


def stop(server: viser.ViserServer) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        server.stop()


@dataclass(frozen=True, eq=False)
class BrowserView:
    position: np.ndarray  # of the camera, in world units, (3,)
    # Quaternion from the camera's axes (x right, y down, z forward) to the world's, (4,).
    wxyz: np.ndarray
    fov: float  # vertical field of view in radians
    width: int
    height: int
    near: float = REFERENCE_NEAR  # depth up to which Gaussians are culled, world units

    def camera(self, longest_side: int) -> Camera:
        """The camera to render with, no side longer than so many pixels."""
        # Here and not above: trainings without a viewer start without it.
        from scipy.spatial.transform import Rotation

        scale = min(1.0, longest_side / max(self.width, self.height))
        width, height = (max(1, round(side * scale)) for side in (self.width, self.height))
        focal = height / (2 * math.tan(self.fov / 2))
        rotation = Rotation.from_quat(np.roll(self.wxyz, -1)).as_matrix().T
        pose = rotation, -rotation @ np.asarray(self.position, dtype=np.float64)
        middle = width / 2, height / 2
        return Camera("browser", width, height, focal, focal, *middle, *pose, near=self.near)


@dataclass(frozen=True, eq=False)
class RenderRequest:
    client: int
    view: BrowserView
    longest_side: int
    version: int

    @property
    def camera(self) -> Camera:
        return self.view.camera(self.longest_side)


@dataclass
class _Client:
    view: BrowserView
    moved_at: float
    version: int = 1
    shown_version: int = 0
    shown_side: int = 0
    shown_at: float = field(default=-math.inf)


class RenderQueue:
    """The pictures that browsers wait for; may be told and asked from any thread."""

    def __init__(
        self, longest_side: int = 1280, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._longest_side = longest_side
        self._clock = clock
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
            # A new one rests until it moves; its first picture is a small one all the same.
            version = 1 if known is None else known.version + 1
            known = self._clients.setdefault(client, _Client(view, self._clock()))
            known.view, known.moved_at, known.version = view, self._clock(), version
        self._changed.set()

    def leaves(self, client: int) -> None:
        with self._lock:
            self._clients.pop(client, None)

    def renew(self) -> None:
        """What is shown has changed: every browser waits for another picture."""
        with self._lock:
            for client in self._clients.values():
                client.version += 1
        self._changed.set()

    def due(self) -> RenderRequest | None:
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
            return RenderRequest(number, client.view, side, client.version)

    def made(self, request: RenderRequest, seconds: float) -> None:
        """A picture was made and sent; its time decides the size of small ones."""
        with self._lock:
            # Time grows with the number of pixels, so a side with its root.
            fitting = request.longest_side * math.sqrt(MOVING_SECONDS / max(seconds, 1e-6))
            self._moving_side = int(min(max(fitting, SMALLEST_SIDE), self._longest_side))
            client = self._clients.get(request.client)
            if client is not None:
                client.shown_version = request.version
                client.shown_side = request.longest_side
                client.shown_at = self._clock()

    def wait(self, seconds: float) -> None:
        """Sleep until something changes, at most so long."""
        self._changed.wait(seconds)
        self._changed.clear()

    def wake(self) -> None:
        self._changed.set()
