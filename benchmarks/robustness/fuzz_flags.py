# SPDX-License-Identifier: Apache-2.0
"""Command lines that nobody should type, and names that files should not have."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pycolmap

from benchmarks.robustness.fuzz_mutations import MANY_DIGITS, NUMBERS
from benchmarks.robustness.fuzz_world import COMMANDS, Command, words_of
from gaussian_splatting.posing.convert_options import convert_parser
from gaussian_splatting.vanilla.vanilla_options import vanilla_parser
from sugar_extractors.export.export_options import export_parser
from sugar_extractors.mesh.mesh_options import mesh_parser
from sugar_extractors.texture.texture_options import texture_parser
from sugar_pipeline.filming.film_options import film_parser
from sugar_pipeline.metrics_options import metrics_parser
from sugar_pipeline.pipeline_flags import full_parser, train_parser
from sugar_pipeline.viewing.view_options import view_parser
from sugar_trainers.coarse_stage import coarse_parser
from sugar_trainers.refine_stage import refine_parser

_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "gaussian_splatting/train.py": lambda: vanilla_parser(None),
    "train.py": lambda: train_parser(None),
    "train_refined.py": lambda: refine_parser(None),
    "extract_mesh.py": lambda: mesh_parser(None),
    "extract_refined_mesh_with_texture.py": lambda: texture_parser(None),
    "metrics.py": lambda: metrics_parser(None),
    "train_full_pipeline.py": lambda: full_parser(None),
    "train_coarse_density.py": lambda: coarse_parser(None),
    "train_coarse_sdf.py": lambda: coarse_parser(None),
    "gaussian_splatting/convert.py": lambda: convert_parser(None),
    "export.py": lambda: export_parser(None),
    "render.py": lambda: film_parser(None),
    "view.py": lambda: view_parser(None),
}
FLAG_COMMANDS = (
    "vanilla", "vanilla eval", "vanilla points", "vanilla nerf", "coarse", "doctor", "refine",
    "mesh", "texture", "metrics", "metrics texture", "resume vanilla", "resume coarse", "full",
    "full", "coarse density", "coarse sdf", "convert", "convert given", "export placed",
    "export glb", "export cloud", "render model", "render video", "render textured", "view model",
    "view textured",
)  # fmt: skip
_LEFT_OUT = {"--demo", "--help"}
"""The demo trains for minutes."""

_WORDS = (
    "", " ", "-", "--", "None", "nan", "inf", "-inf", "True", "maybe", "auto", "a\nb", "\x1b[31m",
    "é", "\udcff\udcfe", "x" * 300, "x" * 50_000, "[1,2", "[]", "1,2,3", "(1,2,3)", "(nan,0,0)",
    "(1e308,-1e308,1e39)", "0x10", "1_000", "१२", "1e3", "3.0", "٣", "%s", "$HOME", "*", "--eval",
    MANY_DIGITS, "[" + MANY_DIGITS + "]",
)  # fmt: skip
_NUMBERS = (*NUMBERS, "3", "10", "100", "1e-30", "1e30", "-7", "0.3", "7000", "65536")
_INPUTS = (
    "", ".", "..", "/", "/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem", "nowhere", "scene",
    "vanilla", "out", "scene/images", "scene/sparse/0/images.bin", "points.ply", "mesh.ply",
    "cloud.ply", "~", "nul\x7f", "\udcff", "x" * 300, "a\nb", "vanilla/cameras.json", "{}", "[",
)  # fmt: skip
_OUTPUTS = (
    "", ".", "new/deep/er", "/dev/null/x", "/proc/x", "/sys/x", "points.ply", "new/" + "x" * 300,
    "new/é\x1b[31m", "new/a\nb", "new/\udcff", "out", "v", "c", "/dev/full", "new/" + "x/" * 3_000,
)  # fmt: skip
_OUTPUT_FLAGS = {
    *("--output_dir", "--gs_output_dir", "--model_path", "--mesh_output_dir", "--ply_output_dir"),
    *("--output", "--path_file"),
}

NAMES = (
    "a\nb.png", "\x1b[31mred.png", "é ü.png", "x" * 240 + ".png", " .png", "-s.png", "a/b/c.png",
    "...png", "a\tb.png", "[bold].png", "%s%n.png", "\u202egnp.png", "view.name.with.dots.png",
    "VIEW_00.PNG", "a'b\".png", "<script>.png", "\x7f.png", "名前.png", "-.png", "a\rb.png",
    "noend", "view_01", "../images/x.png", "/x.png", "~.png", "con.png", "a\u2028b.png",
)  # fmt: skip


def spoil_flags(root: Path, draw: Random) -> tuple[Command, list[str], bool]:
    """A command, its words, and whether it may rightly take forever."""
    command = COMMANDS[draw.choice(FLAG_COMMANDS)]
    words = words_of(command, root)
    actions = [
        action
        for action in _PARSERS[command.script]()._actions
        if action.option_strings and not _LEFT_OUT & set(action.option_strings)
    ]
    lengthy = False
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        action = draw.choice(actions)
        flag = draw.choice(action.option_strings)
        value, number = _value(action, draw)
        lengthy |= number
        shape = draw.randrange(12)
        if action.nargs == 0:
            words += [flag] if shape < 10 else [f"{flag}={value}"]
        elif shape == 0:
            words.append(flag)
        elif shape == 1:
            words += [f"{flag}={value}"]
        elif shape == 2 and flag.startswith("--"):
            words += [flag[: draw.randrange(3, len(flag) + 1)], value]
        elif shape == 3:
            words = [flag, value, *words]
        else:
            words += [flag, value]
    if draw.random() < 0.05:
        del words[draw.randrange(len(words))]
    if draw.random() < 0.05:
        words.insert(draw.randrange(len(words) + 1), draw.choice(_WORDS))
    return command, words, lengthy


def _value(action: argparse.Action, draw: Random) -> tuple[str, bool]:
    """A value, and whether it is a number, which may stand for hours of work."""
    if draw.random() < 0.2:
        return draw.choice(_WORDS), False
    if _OUTPUT_FLAGS & set(action.option_strings):
        return draw.choice(_OUTPUTS), False
    if action.choices:
        return str(draw.choice([*action.choices, "other", ""])), True
    if action.type is Path or action.type is None:
        return draw.choice(_INPUTS), False
    return draw.choice(_NUMBERS), True


def spoil_names(root: Path, draw: Random) -> tuple[Command, list[str], str]:
    """Other names for photographs, the scene or the output; a command, its words, and what."""
    command = COMMANDS[draw.choice(("vanilla", "doctor", "coarse", "vanilla eval"))]
    words = words_of(command, root)
    kind = draw.randrange(4)
    name = draw.choice(NAMES)
    if kind == 0:
        folder = name.replace("/", "").strip(".") or "scene2"
        (root / "scene").rename(root / folder)
        words[words.index("scene")] = folder
        return command, words, f"scene called {folder!r}"
    if kind == 1 and "new" in words:
        words[words.index("new")] = name.lstrip("/-")
        return command, words, f"output called {name!r}"
    _rename_photographs(root / "scene", draw)
    return command, words, "photographs renamed"


def _rename_photographs(scene: Path, draw: Random) -> None:
    """Give photographs other names, in the model as well or in one of the two only."""
    model = pycolmap.Reconstruction()
    model.read_binary(str(scene / "sparse" / "0"))
    both = draw.random() < 0.7
    for image_id in sorted(model.images):
        image, name = model.images[image_id], draw.choice(NAMES)
        old = scene / "images" / image.name
        new = scene / "images" / name.lstrip("/")
        if both or draw.random() < 0.5:
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
        if both or draw.random() < 0.5:
            image.name = name
    model.write_binary(str(scene / "sparse" / "0"))
