# SPDX-License-Identifier: Apache-2.0
"""The viewer's server: whom it serves, and what browsers may send."""

from __future__ import annotations

import functools
import gzip
import http.client
import json
import re
import socket
from types import SimpleNamespace

import pytest

from sugar_viewer import page_corrections
from sugar_viewer.page_server import (
    RenderQueue,
    closing,
    follow_browsers,
    open_server,
    view_of,
)

viser = pytest.importorskip("viser")
client = pytest.importorskip("websockets.sync.client")
exceptions = pytest.importorskip("websockets.exceptions")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    with closing(open_server("127.0.0.1", number, "test")):
        yield number


def connect(port: int, origin: str | None):
    protocol = f"viser-v{viser.__version__}"
    return client.connect(f"ws://127.0.0.1:{port}", origin=origin, subprotocols=[protocol])


@pytest.mark.parametrize("origin", ["http://127.0.0.1:{port}", None])
def test_the_servers_own_page_and_other_programs_are_served(port, origin):
    with connect(port, origin and origin.format(port=port)) as connection:
        assert connection.recv(timeout=10)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://evil.example:{port}",
        "http://127.0.0.1:1",
        "null",
        "http://127.0.0.1",
    ],
)
def test_other_web_pages_get_403(port, origin):
    with pytest.raises(exceptions.InvalidStatus) as refused:
        connect(port, origin.format(port=port))
    assert refused.value.response.status_code == 403


def test_a_foreign_name_that_leads_to_this_machine_gets_403(port):
    """DNS rebinding: page and server have one name, which is not this machine's."""
    for name, status in (("evil.example", 403), ("localhost", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        place = f"{name}:{port}"
        connection.request("GET", "/", headers={"Host": place, "Origin": f"http://{place}"})
        assert connection.getresponse().status == status
        connection.close()


def unpacked(page: str) -> str:
    """The program in viser's page: base 88, then Zstandard, after the style sheet."""
    zstandard = pytest.importorskip("zstandard")
    alphabet = json.loads(re.search(r'const A=("(?:[^"\\]|\\.)*");', page).group(1))
    packed = re.search(r'data-p="([^"]*)"', page).group(1)
    style = int(re.search(r'data-ss="(\d+)"', page).group(1))
    digits = {letter: value for value, letter in enumerate(alphabet)}
    content = bytearray()
    for first in range(0, len(packed), 5):
        group = packed[first : first + 5]
        value = functools.reduce(lambda total, letter: 88 * total + digits[letter], group, 0)
        content += value.to_bytes(8, "big")[-(len(group) - 1) :]
    whole = zstandard.ZstdDecompressor().decompress(bytes(content), max_output_size=1 << 28)
    return whole[style:].decode()


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_the_page_is_served_with_its_corrections(port, encoding):
    """Each of them has exactly one place in the program of this version of viser."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/", headers={"Accept-Encoding": encoding})
    response = connection.getresponse()
    body = response.read()
    assert len(body) == int(response.headers["Content-Length"])
    page = (gzip.decompress(body) if encoding == "gzip" else body).decode()
    program = unpacked(page)
    for old, new in page_corrections._CORRECTIONS:
        assert program.count(old) == 1
        assert page.count(f".replace({json.dumps(old)},{json.dumps(new)})") == 1


def test_a_page_of_another_version_is_left_as_it_is():
    assert page_corrections.corrected_page("<html>other</html>") == "<html>other</html>"


def camera(**changes) -> SimpleNamespace:
    usual = {
        "position": (0.0, 0.0, 1.0),
        "wxyz": (1.0, 0.0, 0.0, 0.0),
        "fov": 0.8,
        "near": 0.01,
        "image_width": 640,
        "image_height": 480,
    }
    return SimpleNamespace(**(usual | changes))


NAN, INF = float("nan"), float("inf")
WRONG = [
    {"fov": 0.0},
    {"fov": NAN},
    {"fov": 4.0},
    {"fov": -1.0},
    {"fov": "wide"},
    {"fov": None},
    {"position": (NAN, 0, 0)},
    {"position": (INF, 0, 0)},
    {"position": (1e300, 0, 0)},
    {"position": (0.0, 0.0)},
    {"wxyz": (0.0, 0.0, 0.0, 0.0)},
    {"wxyz": (NAN, 0, 0, 1)},
    {"wxyz": (1e300, 0, 0, 0)},
    {"image_width": INF},
    {"image_height": 1 << 40},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_view_that_no_picture_can_be_made_from_is_passed_over(change):
    assert view_of(camera(**change)) is None


def test_a_view_of_no_pixels_is_one_of_a_few():
    view = view_of(camera(image_width=0, image_height=0))
    assert (view.width, view.height) == (1, 1)
    assert view.camera(1280).width == 1


def test_a_browser_that_sends_a_wrong_view_keeps_its_last_one():
    callbacks = {}

    class Camera(SimpleNamespace):
        def on_update(self, call):
            callbacks["camera"] = call

    server = SimpleNamespace(
        on_client_connect=lambda call: callbacks.update(connect=call),
        on_client_disconnect=lambda call: callbacks.update(leave=call),
    )
    requests = RenderQueue()
    follow_browsers(server, requests)
    callbacks["connect"](SimpleNamespace(client_id=3, camera=Camera(**vars(camera()))))
    callbacks["camera"](camera(fov=0.0))
    assert requests.due().camera.width > 0
    assert requests.due().view.fov == 0.8
