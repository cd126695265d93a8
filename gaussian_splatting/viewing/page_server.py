# SPDX-License-Identifier: Apache-2.0
"""A server for a page in the browser: the package viser, which brings the page with it."""

from __future__ import annotations

import contextlib
import http
import io
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.viewing.browser_views import BrowserView, Wishes
from gaussian_splatting.viewing.viewer_flags import LOCALHOST
from sugar_utils.errors import UserError
from sugar_utils.optional_packages import load_package
from sugar_utils.schemas import FAR

if TYPE_CHECKING:
    import viser

_EVERYWHERE = ("0.0.0.0", "::", "")
_LOCAL = (LOCALHOST, "127.0.0.1", "::1")
_FOV, _MOST_PIXELS = (1e-3, 3.1), 1 << 20
"""Fields of view in radians, and pixels a side, that a browser may have."""

_FRUSTUM_COLOR = (90, 110, 140)


def load_viser() -> ModuleType:
    """The package.

    Raises:
        UserError: It is not installed.
    """
    return load_package("the viewer", "viser", "viser")[0]


def open_server(host: str, port: int, label: str, flag: str = "--port") -> viser.ViserServer:
    """Serve an empty page.

    Args:
        host: Name or address to listen on.
        port: To listen on; no other is taken in its place.
        label: Heading of the page's panel.
        flag: Named where the port is taken.

    Raises:
        UserError: viser is not installed, or the port is taken.
    """
    module = load_viser()
    check_free(host, port, flag)
    # Its messages are for who writes programs with it.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), _same_origin_only(host):
        server = module.ViserServer(host=host, port=port, label=label, verbose=False)
    server.gui.configure_theme(control_width="large", show_share_button=False)
    return server


@contextlib.contextmanager
def _same_origin_only(host: str) -> Iterator[None]:
    """Servers that start in this context answer requests of other origins with 403.

    Browsers send the origin of the page that makes a request. It must be the ``Host`` of the
    request. A server on a loopback address also requires a loopback name there, against DNS
    rebinding.
    """
    server = load_package("the viewer", "viser", "websockets.asyncio.server")[0]
    serve = server.serve

    def guarded(*arguments: Any, process_request: Callable[..., Any], **how: Any) -> Any:
        def process(connection: Any, request: Any) -> Any:
            origin, asked = request.headers.get("Origin"), request.headers.get("Host", "")
            own = urlsplit(origin or "").netloc == asked
            loopback = host not in _LOCAL or urlsplit(f"//{asked}").hostname in _LOCAL
            if origin is not None and not (own and loopback):
                return connection.respond(http.HTTPStatus.FORBIDDEN, "foreign origin\n")
            return process_request(connection, request)

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
    """Check that a port can be had; viser would silently take the next one.

    Raises:
        UserError: It cannot.
    """
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{host}: not an address of this machine ({error})") from error
    for family, kind, protocol, _, place in places[:1]:
        with socket.socket(family, kind, protocol) as probe:
            if os.name != "nt":
                # A port that was just left may be taken; on Windows it would mean any port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                raise UserError(
                    f"port {port} of {host} cannot be had ({error.strerror or error}); choose "
                    f"another with {flag}"
                ) from error


def follow_browsers(server: viser.ViserServer, wishes: Wishes) -> None:
    """Keep note of where all browsers look, and of which are there."""

    def follow(number: int, camera: Any) -> None:
        view = view_of(camera)
        if view is not None:
            wishes.looks(number, view)

    @server.on_client_connect
    def _(client: Any) -> None:
        follow(client.client_id, client.camera)
        client.camera.on_update(lambda camera: follow(client.client_id, camera))

    @server.on_client_disconnect
    def _(client: Any) -> None:
        wishes.leaves(client.client_id)


def view_of(camera: Any) -> BrowserView | None:
    """Where viser says that a browser looks from; its axes are those of COLMAP.

    None where it says what no picture can be made from: browsers may send anything.
    """
    try:
        position, wxyz = (np.array(part, float) for part in (camera.position, camera.wxyz))
        size = camera.image_width, camera.image_height
        view = BrowserView(position, wxyz, float(camera.fov), *(max(1, int(n)) for n in size))
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
    """Put a picture behind what else a browser shows.

    Args:
        server: The page.
        client: Which browser; nothing happens where it has left.
        picture: (H, W, 3) uint8; None takes the last one away.
    """
    there = server.get_clients().get(client)
    if there is not None:
        there.scene.set_background_image(picture, format="jpeg", jpeg_quality=90)


def stand_at(server: viser.ViserServer, camera: Camera, up: np.ndarray, distance: float) -> None:
    """Where browsers look from when they open the page.

    Args:
        server: The page.
        camera: To stand at.
        up: What is up in the world. (3,)
        distance: From it to what the browser's camera turns around, in world units.
    """
    server.scene.set_up_direction(tuple(float(x) for x in up))
    start = server.initial_camera
    start.position = tuple(camera.center)
    start.look_at = tuple(camera.center + distance * camera.rotation[2])
    start.up = tuple(up)
    start.fov = 2 * math.atan(camera.tan_half_fov[1])
    start.near, start.far = distance / 1_000, distance * 1_000


def turn_of(camera: Camera) -> np.ndarray:
    """From a camera's axes to the world's, as a quaternion wxyz. (4,)"""
    # Here and not above: trainings that nobody watches start without it.
    from scipy.spatial.transform import Rotation

    return np.roll(Rotation.from_matrix(camera.rotation.T).as_quat(), 1)


def look_through(client: Any, camera: Camera) -> None:
    """Let a browser look from a camera, with the height of its view."""
    with client.atomic():
        client.camera.position = camera.center
        client.camera.wxyz = turn_of(camera)
        client.camera.fov = 2 * math.atan(camera.tan_half_fov[1])


def add_frustum(
    server: viser.ViserServer,
    name: str,
    camera: Camera,
    size: float,
    picture: np.ndarray | None = None,
) -> Any:
    """A camera of the capture as a pyramid, with its photograph in it.

    Args:
        server: The page.
        name: Its path in the scene tree.
        camera: Which one.
        size: Of the pyramid, in world units.
        picture: A small photograph. (H, W, 3) uint8
    """
    # viser reads a vertical field of view.
    return server.scene.add_camera_frustum(
        name, 2 * math.atan(camera.tan_half_fov[1]), camera.width / camera.height,
        scale=size, thickness=1.5, thickness_units="screen", color=_FRUSTUM_COLOR, image=picture,
        wxyz=turn_of(camera), position=camera.center, cast_shadow=False, receive_shadow=False,
    )  # fmt: skip


@contextlib.contextmanager
def closing(server: viser.ViserServer) -> Iterator[viser.ViserServer]:
    """Stop a server at the end, whatever happened; its own words about that are not shown."""
    try:
        yield server
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            server.stop()
