# SPDX-License-Identifier: Apache-2.0
"""A page in the browser by viser: views of the browsers, and their pictures."""

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
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from gaussian_splatting.data.cameras import REFERENCE_NEAR, Camera, reduced_size
from gaussian_splatting.engine.observer import LOCALHOST
from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import load_package
from sugar_utils.schemas import FAR
from sugar_viewer.page_corrections import correct_response

Option = TypeVar("Option", bound=str)

if TYPE_CHECKING:
    import viser
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

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
    """Return the package viser; raise a UserError where it is missing."""
    return load_package("the viewer", "viser", "viser")[0]


def open_server(host: str, port: int, label: str, flag: str = "--port") -> viser.ViserServer:
    """Start a server that serves a page with a title.

    Args:
        flag: That chooses the port, for the error.
    """
    module = load_viser()
    check_free(host, port, flag)
    # Its messages are for developers.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), _guarded_pages(host):
        server = module.ViserServer(host=host, port=port, label=label, verbose=False)
    server.gui.configure_theme(control_width="large", show_share_button=False)
    return server


@contextlib.contextmanager
def _guarded_pages(host: str) -> Iterator[None]:
    """Have servers that start in this context refuse requests of other origins with 403.

    The page that they serve is corrected.
    """
    server = load_package("the viewer", "viser", "websockets.asyncio.server")[0]
    serve = server.serve

    def guarded(*arguments: Any, process_request: Callable[..., Any], **how: Any) -> Any:
        async def process(connection: ServerConnection, request: Request) -> Response | None:
            origin = request.headers.get("Origin")
            requested_host = request.headers.get("Host", "")
            is_same_origin = urlsplit(origin or "").netloc == requested_host
            host_name = urlsplit(f"//{requested_host}").hostname
            is_allowed_host = host not in _LOCAL or host_name in _LOCAL
            if origin is not None and not (is_same_origin and is_allowed_host):
                return connection.respond(http.HTTPStatus.FORBIDDEN, "foreign origin\n")
            response = process_request(connection, request)
            if inspect.isawaitable(response):
                response = await response
            correct_response(response)
            return response

        return serve(*arguments, process_request=process, **how)

    server.serve = guarded  # pyright: ignore[reportAttributeAccessIssue]  a module's function
    try:
        yield
    finally:
        server.serve = serve  # pyright: ignore[reportAttributeAccessIssue]


def address(host: str, port: int) -> str:
    """Return the address of the page for a browser on this machine."""
    name = LOCALHOST if host in _EVERYWHERE else host
    return f"http://{name}:{port}"


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
    """Report to a queue where all browsers look, and when they leave."""

    def follow(number: int, camera: viser.CameraHandle) -> None:
        view = view_of(camera)
        if view is not None:
            requests.looks(number, view)

    @server.on_client_connect
    def _(client: viser.ClientHandle) -> None:
        follow(client.client_id, client.camera)
        client.camera.on_update(lambda camera: follow(client.client_id, camera))

    @server.on_client_disconnect
    def _(client: viser.ClientHandle) -> None:
        requests.leaves(client.client_id)


def view_of(camera: viser.CameraHandle) -> BrowserView | None:
    """Return the view of a browser's camera in viser; None if its values are malformed."""
    try:
        view = BrowserView(
            position=np.array(camera.position, float),
            wxyz=np.array(camera.wxyz, float),
            fov=float(camera.fov),
            width=max(1, int(camera.image_width)),
            height=max(1, int(camera.image_height)),
            near=min(REFERENCE_NEAR, _NEAR_FACTOR * float(camera.near)),
        )
    except (TypeError, ValueError, OverflowError):
        return None
    if view.position.shape != (3,) or view.wxyz.shape != (4,):
        return None
    lowest_fov, highest_fov = _FOV
    if not lowest_fov <= view.fov <= highest_fov:
        return None
    if not (np.abs(view.position) <= FAR).all():
        return None
    if not 1e-6 <= np.abs(view.wxyz).max() <= FAR:
        return None
    return view if max(view.width, view.height) <= _MOST_PIXELS else None


def selected_option(choice: viser.GuiDropdownHandle[Option]) -> Option:
    """Return the selected option of a dropdown; the first one if a browser sent another text."""
    return choice.value if choice.value in choice.options else choice.options[0]


def show_picture(server: viser.ViserServer, client: int, picture: np.ndarray | None) -> None:
    """Set the background picture, (H, W, 3) uint8, of a browser; None removes it."""
    connection = server.get_clients().get(client)
    if connection is not None:
        connection.scene.set_background_image(picture, format="jpeg", jpeg_quality=90)


def stand_at(server: viser.ViserServer, camera: Camera, up: np.ndarray, distance: float) -> None:
    """Set where browsers look from when they open the page.

    Args:
        up: Direction in the world. (3,)
        distance: From the camera to the point that it turns around, in world units.
    """
    x, y, z = up.astype(float).tolist()
    server.scene.set_up_direction((x, y, z))
    start = server.initial_camera
    start.position = tuple(camera.center)
    start.look_at = tuple(camera.center + distance * camera.rotation[2])
    start.up = tuple(up)
    start.fov = vertical_fov(camera)
    start.near = distance / 1_000
    start.far = distance * 1_000


def vertical_fov(camera: Camera) -> float:
    """Return the field of view that viser reads, in radians."""
    return 2 * math.atan(camera.tan_half_fov[1])


def turn_of(camera: Camera) -> np.ndarray:
    """Return the rotation from a camera's axes to the world's, as a quaternion wxyz. (4,)"""
    # Imported here, so that trainings without a viewer start without it.
    from scipy.spatial.transform import Rotation

    return np.roll(Rotation.from_matrix(camera.rotation.T).as_quat(), 1)


def look_through(client: viser.ClientHandle, camera: Camera) -> None:
    """Let a browser look from a camera, with the height of its view."""
    with client.atomic():
        client.camera.position = camera.center
        client.camera.wxyz = turn_of(camera)
        client.camera.fov = vertical_fov(camera)


def add_frustum(
    server: viser.ViserServer, name: str, camera: Camera, size: float
) -> viser.CameraFrustumHandle:
    """Add a camera of the capture as a pyramid; ``size`` is in world units."""
    return server.scene.add_camera_frustum(
        name,
        vertical_fov(camera),
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
    """Stop a server at the end, whatever happened, without its messages."""
    try:
        yield server
    finally:
        stop(server)


def stop(server: viser.ViserServer) -> None:
    """Stop a server without its messages."""
    with contextlib.redirect_stdout(io.StringIO()):
        server.stop()


@dataclass(frozen=True, eq=False)
class BrowserView:
    """Where a browser looks from, and its size in pixels."""

    position: np.ndarray  # of the camera, in world units, (3,)
    # Quaternion from the camera's axes (x right, y down, z forward) to the world's, (4,).
    wxyz: np.ndarray
    fov: float  # vertical field of view in radians
    width: int
    height: int
    near: float = REFERENCE_NEAR  # depth up to which Gaussians are culled, world units

    def camera(self, longest_side: int) -> Camera:
        """Return the camera to render with, no side longer than so many pixels."""
        # Imported here, so that trainings without a viewer start without it.
        from scipy.spatial.transform import Rotation

        width, height = reduced_size(self.width, self.height, longest_side)
        focal = height / (2 * math.tan(self.fov / 2))
        rotation = Rotation.from_quat(np.roll(self.wxyz, -1)).as_matrix().T
        position = np.asarray(self.position, dtype=np.float64)
        return Camera(
            name="browser",
            width=width,
            height=height,
            fx=focal,
            fy=focal,
            cx=width / 2,
            cy=height / 2,
            rotation=rotation,
            translation=-rotation @ position,
            near=self.near,
        )


@dataclass(frozen=True, eq=False)
class RenderRequest:
    """A picture that a browser waits for."""

    client: int  # number of the browser
    view: BrowserView
    longest_side: int  # of the picture, in pixels
    version: int  # of what the browser is to show

    @property
    def camera(self) -> Camera:
        """The camera to render with."""
        return self.view.camera(self.longest_side)


@dataclass
class _Client:
    """A connected browser: its requested view, and its last picture."""

    view: BrowserView
    moved_at: float  # seconds of the clock
    version: int = 1  # grows with every change of the view or of the results
    shown_version: int = 0  # of the last picture
    shown_side: int = 0  # longest side of the last picture, in pixels
    shown_at: float = field(default=-math.inf)  # seconds of the clock


class RenderQueue:
    """The pictures that browsers wait for; safe to use from any thread."""

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
        """Return the number of browsers."""
        return len(self._clients)

    def looks(self, client: int, view: BrowserView) -> None:
        """Note where a browser looks from; a new one is added."""
        with self._lock:
            now = self._clock()
            browser = self._clients.get(client)
            if browser is None:
                # It rests until it moves; its first picture is a small one all the same.
                self._clients[client] = _Client(view, moved_at=now)
            else:
                browser.view = view
                browser.moved_at = now
                browser.version += 1
        self._changed.set()

    def leaves(self, client: int) -> None:
        """Forget a browser."""
        with self._lock:
            self._clients.pop(client, None)

    def renew(self) -> None:
        """Note that the results changed: every browser waits for another picture."""
        with self._lock:
            for client in self._clients.values():
                client.version += 1
        self._changed.set()

    def due(self) -> RenderRequest | None:
        """Return the next picture, for the browser that waited longest; None if none is due."""
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
        """Note that a picture was sent; its time decides the size of small ones."""
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
        """End a :meth:`wait` in another thread."""
        self._changed.set()
