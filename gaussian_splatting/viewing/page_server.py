# SPDX-License-Identifier: Apache-2.0
"""A server for a page in the browser: the package viser, which brings the page with it."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.viewing.browser_views import BrowserView, Wishes
from gaussian_splatting.viewing.viewer_flags import LOCALHOST
from sugar_utils.errors import UserError
from sugar_utils.optional_packages import load_package

if TYPE_CHECKING:
    import viser

_EVERYWHERE = ("0.0.0.0", "::", "")
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
    with contextlib.redirect_stdout(io.StringIO()):
        server = module.ViserServer(host=host, port=port, label=label, verbose=False)
    server.gui.configure_theme(control_width="large", show_share_button=False)
    return server


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

    @server.on_client_connect
    def _(client: Any) -> None:
        wishes.looks(client.client_id, view_of(client.camera))

        @client.camera.on_update
        def _(camera: Any) -> None:
            wishes.looks(client.client_id, view_of(camera))

    @server.on_client_disconnect
    def _(client: Any) -> None:
        wishes.leaves(client.client_id)


def view_of(camera: Any) -> BrowserView:
    """Where viser says that a browser looks from; its axes are those of COLMAP."""
    return BrowserView(
        np.array(camera.position), np.array(camera.wxyz), float(camera.fov),
        max(1, int(camera.image_width)), max(1, int(camera.image_height)),
    )  # fmt: skip


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
