# SPDX-License-Identifier: Apache-2.0
"""``convert.py``, ``export.py``, ``render.py`` and ``view.py`` as targets, and the files they read.

::

    room/      photographs and their conversion        path.json    cameras of a path
    exports/   Gaussians and a mesh in every format that is read again
    new0/      exports that others may replace
"""

from __future__ import annotations

import functools
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import sugar_utils  # noqa: F401  before torch

# isort: split
import export
import render
import view
from benchmarks.robustness.child import Command
from gaussian_splatting import convert
from gaussian_splatting.posing.scene_folder import RECORD, WORK
from gaussian_splatting.viewing.page_server import load_viser
from sugar_pipeline.viewing import view_run
from tests.support.photographed_room import WIDTH, write_photographs

_PHOTOGRAPHS, _ROUNDS = 5, 3
_REFINED = "out/refined/scene/{refined}"
_TEXTURED = "out/refined_mesh/scene/{textured}"
_CAPTURE = ("-s", "scene", "-c", "vanilla")
_FAST = ("--extraction_size", str(WIDTH), "--max_features", "600")
_RESULTS = ("scene", "vanilla", "out")

EXPORTS = ("cloud.spz", "cloud.splat", "cloud.gltf.glb", "mesh.glb")
"""Files of ``exports/``."""


def _view() -> None:
    """``view.py`` at a port that is free; it ends after some rounds of work, as by Ctrl-C."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        sys.argv[1:1] = ["--no_open", "--port", str(taken.getsockname()[1])]
    rounds = iter(range(_ROUNDS))
    ended = functools.partial(view_run.view, until=lambda: next(rounds, None) is None)
    with patch.object(view_run, "view", ended):
        view.main()


def _convert(name: str, *more: str) -> Command:
    flags = ("-s", "room", *_FAST, *more)
    return Command(name, "gaussian_splatting/convert.py", convert.main, flags, ("room",))


def _export(name: str, result: str, to: str, *more: str, needs: tuple[str, ...]) -> Command:
    flags = (result, "--to", to, "-o", "new/result", *more)
    return Command(f"export {name}", "export.py", export.main, flags, needs)


def _render(name: str, result: str, *more: str, needs: tuple[str, ...] = _RESULTS) -> Command:
    flags = (result, "-s", "scene", "-o", "new", "--n_frames", "2", *more)
    return Command(f"render {name}", "render.py", render.main, flags, needs)


def _look(name: str, *results: str, needs: tuple[str, ...] = _RESULTS) -> Command:
    flags = (*results, "--picture_size", "64", "--path_file", "new/path.json")
    return Command(f"view {name}", "view.py", _view, flags, needs)


def _of_exports() -> list[Command]:
    """Every file of ``exports/``, read again."""
    commands = []
    for name in EXPORTS:
        path, needs = f"exports/{name}", ("scene", "exports")
        commands.append(_look(name, path, needs=needs))
        if name != "mesh.glb":
            commands.append(_export(name, path, "splat", needs=needs))
            commands.append(_render(name, path, "--path", "test", needs=needs))
    return commands


TOOLS = (
    _convert("convert"),
    _convert("convert given", "--skip_matching"),
    _export("spz", _REFINED, "spz", needs=_RESULTS),
    _export(
        "placed", _REFINED, "ply", *_CAPTURE, "--orient", "up", "--known_distance", "view_00.png",
        "view_01.png", "2", needs=_RESULTS,
    ),
    _export("cloud", "cloud.ply", "gltf", needs=("cloud.ply",)),
    _export("glb", _TEXTURED, "glb", "--max_triangles", "60", needs=_RESULTS),
    _export("obj", _TEXTURED, "obj", "--texture_size", "32", needs=_RESULTS),
    _export("stl", _TEXTURED, "stl", "--scale_factor", "2", needs=_RESULTS),
    _export("usdz", _TEXTURED, "usdz", "--orient", "up", *_CAPTURE, needs=_RESULTS),
    _render("model", _REFINED, "--path", "test", "--show", "image", "depth", "normal", "alpha"),
    _render("capture", _REFINED, "-c", "vanilla", "--path", "between"),
    _render("video", "cloud.ply", "-o", "new/film.mp4", needs=("scene", "cloud.ply")),
    _render("path", _REFINED, "--path", "path.json", needs=(*_RESULTS, "path.json")),
    _render("mesh", "mesh.ply", "--show", "clay", "normal", needs=("scene", "mesh.ply")),
    _render("textured", _TEXTURED, "--show", "image", "clay", "depth"),
    _look("model", _REFINED, *_CAPTURE),
    _look("output", "out"),
    _look("cloud", "cloud.ply", "mesh.ply", needs=("cloud.ply", "mesh.ply")),
    _look("textured", _TEXTURED, "--scale_factor", "2"),
    *_of_exports(),
)  # fmt: skip
"""Their commands; like those of ``fuzz_world.py`` they work on the untouched world."""


def write_inputs(root: Path, run: Callable[[Command], None]) -> None:
    """Write what these commands read, beside a finished pipeline.

    Args:
        root: The world.
        run: Runs an entry point in it.
    """
    shutil.copy(root / "vanilla" / "cameras.json", root / "path.json")
    write_photographs(root / "room" / "input", _PHOTOGRAPHS)
    run(TOOLS[0])
    _forget_model(root / "room" / WORK / RECORD)
    (root / "exports").mkdir()
    for name in EXPORTS:
        to = name.split(".", 1)[1] if name != "cloud.gltf.glb" else "gltf"
        result = _TEXTURED if name == "mesh.glb" else "cloud.ply"
        flags = (result, "--to", to, "-o", f"exports/{name}")
        run(Command(f"export {name}", "export.py", export.main, flags, ()))
    for flags in ((_REFINED, "--to", "ply"), (_TEXTURED, "--to", "obj", "--texture_size", "31")):
        old = (*flags, "-o", "new0/result")
        run(Command("export", "export.py", export.main, old, ()))


def _forget_model(record: Path) -> None:
    """Turn a finished conversion into one that ended after pairs were compared."""
    noted = json.loads(record.read_text(encoding="utf-8"))
    kept = {k: v for k, v in noted.items() if k not in ("models", "flattened", "finished")}
    record.write_text(json.dumps(kept), encoding="utf-8")


def load_servers() -> None:
    """Load what :func:`_view` needs; a page in this process would leave threads behind."""
    load_viser()
