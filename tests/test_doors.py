# SPDX-License-Identifier: Apache-2.0
"""Pipes, sockets and devices in place of files: refused at every door, in one line, at once."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gaussian_splatting.data.colmap import read_colmap
from gaussian_splatting.data.images import decode_image, image_size
from gaussian_splatting.data.names import ImageFolder
from gaussian_splatting.data.scans.scan_files import read_scan, scan_system
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.formats.ply import read_gaussian_ply, read_point_ply
from sugar_extractors.any_mesh import read_any_mesh
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, fingerprint, read_json, require_regular_file
from tests.support.tiny_scene import make_tiny_scene

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="makes POSIX pipes")


@pytest.fixture
def pipe(tmp_path) -> Iterator[Callable[[Path], Path]]:
    """Puts a pipe somewhere; a reader that waits all the same is released after some seconds."""
    timers = []

    def make(path: Path) -> Path:
        path.unlink(missing_ok=True)
        os.mkfifo(path)

        def let_go() -> None:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

        timers.append(threading.Timer(10, let_go))
        timers[-1].start()
        return path

    yield make
    for timer in timers:
        timer.cancel()


def write_over(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"")


DOORS = {
    "image size": (image_size, "a.png"),
    "photograph": (lambda path: decode_image(path, 4, 4), "a.png"),
    "Gaussians": (read_gaussian_ply, "a.ply"),
    "points": (read_point_ply, "a.ply"),
    "LAS scan": (scan_system, "a.las"),
    "PLY scan": (lambda path: read_scan(path, 9, print, lambda x: x, np.isfinite), "a.ply"),
    "mesh": (read_mesh_ply, "a.ply"),
    "any PLY": (read_any_mesh, "a.ply"),
    "any OBJ": (read_any_mesh, "a.obj"),
    "any checkpoint": (read_any_mesh, "a.pt"),
    "textured mesh": (read_textured_mesh, "a.obj"),
    "checkpoint": (load_payload, "a.pt"),
    "JSON": (read_json, "a.json"),
    "log": (Console, "log.txt"),
    "identity": (fingerprint, "a.pt"),
    "result": (write_over, "a.pt"),
}


@pytest.mark.parametrize(("open_it", "name"), DOORS.values(), ids=DOORS)
def test_pipe_is_refused_at_once(open_it, name, pipe, tmp_path):
    with pytest.raises(UserError, match=r"is a pipe, where a file is needed") as caught:
        open_it(pipe(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["cameras", "images", "points3D", "rigs", "frames"])
def test_pipe_in_a_colmap_model_is_refused(part, pipe, tmp_path):
    make_tiny_scene(tmp_path, n_views=2)
    pipe(tmp_path / "sparse" / "0" / f"{part}.bin")
    with pytest.raises(UserError):
        read_colmap(tmp_path / "sparse" / "0", ImageFolder(tmp_path / "images"))


def test_pipe_as_material_or_texture_is_refused(pipe, tmp_path):
    obj = tmp_path / "mesh.obj"
    obj.write_text("mtllib mesh.mtl\nv 0 0 0\nvt 0 0\nf 1/1 1/1 1/1\n")
    pipe(tmp_path / "mesh.mtl")
    with pytest.raises(UserError, match=r"mesh\.mtl is a pipe"):
        read_textured_mesh(obj)
    (tmp_path / "mesh.mtl").unlink()
    (tmp_path / "mesh.mtl").write_text("newmtl mesh\nmap_Kd mesh.png\n")
    pipe(tmp_path / "mesh.png")
    with pytest.raises(UserError, match=r"mesh\.png is a pipe"):
        read_textured_mesh(obj)


def test_other_things_are_named(tmp_path):
    with pytest.raises(UserError, match="is a folder, where a file is needed"):
        require_regular_file(tmp_path)
    with pytest.raises(UserError, match="is a device, where a file is needed"):
        require_regular_file(Path(os.devnull))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(UserError, match="is a socket, where a file is needed"):
            require_regular_file(tmp_path / "s")


def test_what_cannot_be_looked_at_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        require_regular_file(tmp_path / "none")
    with pytest.raises(UserError, match="File name too long"):
        require_regular_file(tmp_path / ("x" * 300), missing_ok=True)
    with pytest.raises(UserError, match="null byte"):
        require_regular_file(tmp_path / "x\0y", missing_ok=True)
    assert require_regular_file(tmp_path / "none", missing_ok=True) == tmp_path / "none"


def test_links_to_files_are_files(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert require_regular_file(tmp_path / "b") == tmp_path / "b"
