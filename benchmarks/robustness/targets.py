# SPDX-License-Identifier: Apache-2.0
"""Kinds of cases: which file, flag or name is corrupted, and which entry point then reads it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pycolmap

from benchmarks.robustness import damage, mutations, world
from benchmarks.robustness.mutations import MANY_DIGITS, NUMBERS
from benchmarks.robustness.world import COMMANDS, EXPORTS, PARTS, RUNS, Command, words_of
from sugar_pipeline.command_line import PROGRAMS

Corrupt = Callable[[Path, Random], str]


@dataclass(frozen=True)
class Plan:
    """A command for a corrupted scene: an entry point and its flags.

    A ``lengthy`` one may rightly run for hours, and only has to be interruptible. ``same_bits``
    tells when success means the result of an undisturbed run: ``always``, where checksums reveal
    the damage, or ``fallback``, if an earlier checkpoint was used; empty: never.
    """

    command: Command
    words: list[str]
    what: str
    lengthy: bool = False
    same_bits: str = ""


_READERS = {
    "SCENE": "vanilla,vanilla,vanilla eval,doctor,coarse,render capture,view model",
    "CHECKPOINT": "coarse,doctor,metrics,export placed",
    "REFINED": "metrics,texture,pipeline,export spz,export placed,render model,view model",
    "TEXTURED": "metrics texture,export glb,export obj,export stl,render textured,view textured",
}
_TABLE = """
image               image       scene/images/*.*=SCENE,metrics
nerf image          image       nerf/train/*.png=vanilla nerf; ngp/images/*.png=vanilla ngp
mask                image       masks/*.*=vanilla masked,vanilla ignoring,doctor masked
converted image     image       room/input/*=convert
conversion          by suffix   room/distorted/*.*=convert,convert given;\
 room/distorted/sparse/0/*.bin=convert,convert given
known cameras       text        known.xml=convert known
zip scene           by suffix   zipped.zip=vanilla zip
settings            by suffix   settings.toml=vanilla settings
colmap bin          bytes       scene/sparse/0/*.bin=SCENE
colmap txt          text        text/sparse/0/*.txt=vanilla text,doctor text
transforms          json        nerf/*.json=vanilla nerf,doctor nerf;\
 ngp/*.json=vanilla ngp,doctor ngp
gaussians ply       ply         vanilla/point_cloud/*/*.ply=coarse,doctor,export vanilla;\
 cloud.ply=vanilla cloud,export cloud,render video,view cloud
points ply          ply         points.ply=vanilla points; ngp/points.ply=vanilla ngp
mesh ply            ply         mesh.ply=refine,render mesh,view cloud
camera path         json        path.json=render path
result              by suffix   out/coarse_mesh/**/*.*=pipeline; out/refined_mesh/**/*.json=pipeline
textured mesh       by suffix   out/refined_mesh/**/sugar*.obj=TEXTURED;\
 out/refined_mesh/**/sugar*.mtl=TEXTURED; out/refined_mesh/**/sugar*.png=TEXTURED
checkpoint bytes    bytes       RUNS/**/[0-9]*.pt
checkpoint contents checkpoint  RUNS/**/[0-9]*.pt
model bytes         bytes       out/coarse/**/[0-9]*.pt=mesh; out/refined/**/[0-9]*.pt=REFINED
model contents      checkpoint  out/coarse/**/[0-9]*.pt=mesh; out/refined/**/[0-9]*.pt=REFINED
cameras json        json        vanilla/cameras.json=CHECKPOINT,render capture,view model
cfg_args            cfg_args    vanilla/cfg_args=CHECKPOINT
run json            json        RUNS/**/run.json;\
 out/**/run.json=pipeline,export placed,view output
scenes json         json        scenes.json=metrics
"""
_CORRUPT: dict[str, Corrupt] = {
    "image": mutations.corrupt_image,
    "checkpoint": mutations.corrupt_checkpoint,
    "bytes": damage.damage_bytes,
    "text": damage.damage_text,
    "json": damage.damage_json,
    "ply": damage.damage_ply,
    "cfg_args": damage.damage_cfg_args,
    "by suffix": damage.damage_file,
}


def _kinds() -> dict[str, tuple[Corrupt, list[tuple[str, list[str]]]]]:
    found = {}
    for line in _TABLE.strip().splitlines():
        reads = []
        for read in line[32:].split(";"):
            pattern, _, names = read.strip().partition("=")
            for word, readers in _READERS.items():
                names = names.replace(word, readers)
            if pattern.startswith("RUNS"):
                reads += [(pattern.replace("RUNS", k), [name]) for k, name in RUNS.items()]
            else:
                reads.append((pattern, names.split(",")))
        found[line[:20].strip()] = _CORRUPT[line[20:32].strip()], reads
    exports = [(f"exports/{k}", [c for c in COMMANDS if c.endswith(f" {k}")]) for k in EXPORTS]
    return {**found, "exported": (damage.damage_file, exports)}


KINDS = _kinds()
"""Corruptions of each kind of file: patterns of files, each with the commands that read them."""

_SAME_BITS = {"checkpoint bytes": "always", "checkpoint contents": "fallback"}
TURNS = (*KINDS, "flags", "flags", "names", "in place")
"""Kind of case k: entry k modulo their number, so that a case depends on its number alone."""


def kind_of(case: int) -> str:
    return TURNS[case % len(TURNS)]


def parts_of(kind: str) -> tuple[str, ...]:
    """Parts of the world that cases of a kind may need."""
    if kind not in KINDS:
        return PARTS
    names = {name for _, readers in KINDS[kind][1] for name in readers}
    return tuple(part for part in PARTS if any(part in COMMANDS[name].needs for name in names))


def corrupt(kind: str, root: Path, draw: Random) -> Plan:
    """Corrupt a fresh copy of a world; everything follows from ``draw``."""
    if kind == "flags":
        return _corrupt_flags(root, draw)
    if kind == "names":
        return _corrupt_names(root, draw)
    change, reads = KINDS[kind if kind in KINDS else draw.choice(list(KINDS))]
    pattern, names = draw.choice(reads)
    target = draw.choice([path for path in sorted(root.glob(pattern)) if path.is_file()])
    command = COMMANDS[draw.choice(names)]
    words, shown = words_of(command, root), target.relative_to(root).as_posix()
    if kind == "in place":
        what = draw.choice(mutations.IN_PLACE)
        mutations.put_in_place(target, what)
        return Plan(command, words, f"{what} in place of {shown}")
    if draw.random() < 0.03:
        other = draw.choice([path for path in sorted(root.rglob("*")) if path.is_file()])
        target.write_bytes(other.read_bytes())
        return Plan(command, words, f"{shown} is a copy of {other.relative_to(root)}")
    what = change(target, draw)
    # Of another number of iterations, like flags.
    lengthy = target.suffix == ".toml"
    what = f"{what} ({shown})"
    return Plan(command, words, what, lengthy, same_bits=_SAME_BITS.get(kind, ""))


def expected_bits(plan: Plan, root: Path, base: Path) -> tuple[Path, Path] | None:
    """The final checkpoint of a continued run, and the undisturbed one that it must equal."""
    folder = next((part for part, name in RUNS.items() if name == plan.command.name), None)
    if not plan.same_bits or folder is None:
        return None
    newest = world.newest_checkpoint(base / f"{folder}0")
    return root / folder / newest.relative_to(base / f"{folder}0"), newest


_FILES = tuple(f" {file}" for file in EXPORTS)
_LEFT_OUT = {"--demo", "--help"}
"""The demo trains for minutes."""

_FLAG_COMMANDS = [
    *(name for name in COMMANDS if not name.startswith("resume ") and not name.endswith(_FILES)),
    *("resume vanilla", "resume coarse"),
]
_WORDS = (
    "",
    " ",
    "-",
    "--",
    "None",
    "nan",
    "inf",
    "-inf",
    "True",
    "maybe",
    "auto",
    "a\nb",
    "\x1b[31m",
    "é",
    "\udcff\udcfe",
    "x" * 300,
    "x" * 50_000,
    "[1,2",
    "[]",
    "1,2,3",
    "(1,2,3)",
    "(nan,0,0)",
    "(1e308,-1e308,1e39)",
    "0x10",
    "1_000",
    "१२",
    "1e3",
    "3.0",
    "٣",
    "%s",
    "$HOME",
    "*",
    "--eval",
    MANY_DIGITS,
    "[" + MANY_DIGITS + "]",
)
_MORE_NUMBERS = (*NUMBERS, "3", "10", "100", "1e-30", "1e30", "-7", "0.3", "7000", "65536")
_INPUTS = (
    "",
    ".",
    "..",
    "/",
    "/dev/zero",
    "/dev/full",
    "/dev/null",
    "/proc/self/mem",
    "nowhere",
    "scene",
    "vanilla",
    "out",
    "scene/images",
    "scene/sparse/0/images.bin",
    "points.ply",
    "mesh.ply",
    "cloud.ply",
    "~",
    "nul\x7f",
    "\udcff",
    "x" * 300,
    "a\nb",
    "vanilla/cameras.json",
    "{}",
    "[",
)
_OUTPUTS = (
    "",
    ".",
    "new/deep/er",
    "/dev/null/x",
    "/proc/x",
    "/sys/x",
    "points.ply",
    "new/" + "x" * 300,
    "new/é\x1b[31m",
    "new/a\nb",
    "new/\udcff",
    "out",
    "v",
    "c",
    "/dev/full",
    "new/" + "x/" * 3_000,
)
_OUTPUT_FLAGS = {
    "--output_dir",
    "--gs_output_dir",
    "--model_path",
    "--mesh_output_dir",
    "--output",
    "--path_file",
}
NAMES = (
    "a\nb.png",
    "\x1b[31mred.png",
    "é ü.png",
    "x" * 240 + ".png",
    " .png",
    "-s.png",
    "a/b/c.png",
    "...png",
    "a\tb.png",
    "[bold].png",
    "%s%n.png",
    "\u202egnp.png",
    "view.name.with.dots.png",
    "VIEW_00.PNG",
    "a'b\".png",
    "<script>.png",
    "\x7f.png",
    "名前.png",
    "-.png",
    "a\rb.png",
    "noend",
    "view_01",
    "../images/x.png",
    "/x.png",
    "~.png",
    "con.png",
    "a\u2028b.png",
)


def _corrupt_flags(root: Path, draw: Random) -> Plan:
    command = COMMANDS[draw.choice(_FLAG_COMMANDS)]
    words, lengthy = words_of(command, root), False
    every = PROGRAMS[command.script].make_parser(None)._actions
    actions = [a for a in every if a.option_strings and not _LEFT_OUT & set(a.option_strings)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        action = draw.choice(actions)
        flag = draw.choice(action.option_strings)
        value, number = _value(action, draw)
        lengthy |= number
        shape = draw.randrange(12)
        if action.nargs == 0:
            words += [flag] if shape < 10 else [f"{flag}={value}"]
        elif shape < 2:
            words.append((flag, f"{flag}={value}")[shape])
        elif shape == 2 and flag.startswith("--"):
            words += [flag[: draw.randrange(3, len(flag) + 1)], value]
        else:
            words = [flag, value, *words] if shape == 3 else [*words, flag, value]
    if draw.random() < 0.05:
        del words[draw.randrange(len(words))]
    if draw.random() < 0.05:
        words.insert(draw.randrange(len(words) + 1), draw.choice(_WORDS))
    return Plan(command, words, " ".join(words)[-300:], lengthy)


def _value(action: argparse.Action, draw: Random) -> tuple[str, bool]:
    """A value, and whether it is a number, which may mean hours of work."""
    if draw.random() < 0.2:
        return draw.choice(_WORDS), False
    if _OUTPUT_FLAGS & set(action.option_strings):
        return draw.choice(_OUTPUTS), False
    if action.choices:
        return str(draw.choice([*action.choices, "other", ""])), True
    if action.type is Path or action.type is None:
        return draw.choice(_INPUTS), False
    return draw.choice(_MORE_NUMBERS), True


def _corrupt_names(root: Path, draw: Random) -> Plan:
    """Other names for the scene, the output or the images."""
    command = COMMANDS[draw.choice(("vanilla", "doctor", "coarse", "vanilla eval"))]
    words, kind, name = words_of(command, root), draw.randrange(4), draw.choice(NAMES)
    if kind == 0:
        folder = name.replace("/", "").strip(".") or "scene2"
        (root / "scene").rename(root / folder)
        words[words.index("scene")] = folder
        return Plan(command, words, f"scene called {folder!r}")
    if kind == 1 and "new" in words:
        words[words.index("new")] = name.lstrip("/-")
        return Plan(command, words, f"output called {name!r}")
    model_path, images = str(root / "scene" / "sparse" / "0"), root / "scene" / "images"
    model = pycolmap.Reconstruction()
    model.read_binary(model_path)
    both = draw.random() < 0.7
    for image_id in sorted(model.images):
        image, name = model.images[image_id], draw.choice(NAMES)
        new = images / name.lstrip("/")
        if both or draw.random() < 0.5:
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(images / image.name, new)
        if both or draw.random() < 0.5:
            image.name = name
    model.write_binary(model_path)
    return Plan(command, words, "images renamed")
