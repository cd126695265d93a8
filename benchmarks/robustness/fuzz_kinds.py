# SPDX-License-Identifier: Apache-2.0
"""Kinds of cases: which file of a world is spoiled, how, and which entry point then reads it."""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.robustness.fuzz_flags import spoil_flags, spoil_names
from benchmarks.robustness.fuzz_mutations import (
    DEEP,
    IN_PLACE,
    MANY_DIGITS,
    NUMBERS,
    STRINGS,
    mutate_bytes,
    mutate_json,
    mutate_text,
    put_in_place,
)
from benchmarks.robustness.fuzz_payloads import spoil_payload
from benchmarks.robustness.fuzz_photos import spoil_photo
from benchmarks.robustness.fuzz_world import COMMANDS, RUNS, Command, run_folder, words_of
from benchmarks.robustness.tool_commands import EXPORTS

Spoil = Callable[[Path, Random], str]
SameBits = Literal["never", "always", "fallback"]


@dataclass(frozen=True)
class Plan:
    """What to run in a spoiled world.

    Attributes:
        command: The entry point.
        words: Its flags.
        what: What was spoiled, for people.
        lengthy: Whether it may rightly take forever, so that it is enough that it can be stopped.
        same_bits: Whether success means the result of an undisturbed run: ``always``, where
            checksums show the damage; ``fallback``, where an earlier checkpoint was taken.
    """

    command: Command
    words: list[str]
    what: str
    lengthy: bool = False
    same_bits: SameBits = "never"


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        spoil: Changes a file and says how.
        reads: Patterns of files, relative to the root, each with the entry points that read them.
        same_bits: See :class:`Plan`.
    """

    spoil: Spoil
    reads: tuple[tuple[str, tuple[str, ...]], ...]
    same_bits: SameBits = "never"

    @property
    def commands(self) -> tuple[str, ...]:
        """All that read a file of this kind."""
        return tuple(dict.fromkeys(name for _, names in self.reads for name in names))


def _bytes(path: Path, draw: Random) -> str:
    path.write_bytes(mutate_bytes(path.read_bytes(), draw))
    return f"{path.name}: bytes"


def _text(path: Path, draw: Random) -> str:
    if draw.random() < 0.3:
        return _bytes(path, draw)
    text = mutate_text(path.read_text(encoding="utf-8"), draw)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"{path.name}: text"


def _json(path: Path, draw: Random) -> str:
    if draw.random() < 0.25:
        return _text(path, draw)
    text = mutate_json(path.read_text(encoding="utf-8"), draw)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"{path.name}: JSON"


def _ply(path: Path, draw: Random) -> str:
    """Of a PLY the header is text, and tells how the rest is read."""
    data = path.read_bytes()
    end = data.find(b"end_header\n") + len(b"end_header\n")
    if end <= 10 or draw.random() < 0.5:
        return _bytes(path, draw)
    header = mutate_text(data[:end].decode("ascii"), draw)
    path.write_bytes(header.encode("utf-8", "surrogatepass") + data[end:])
    return f"{path.name}: header"


def _glb(path: Path, draw: Random) -> str:
    """Of a GLB the first chunk is JSON, which tells how the rest is read."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    if draw.random() < 0.4:
        return _bytes(path, draw)
    text = mutate_json(data[20 : 20 + length].decode("utf-8"), draw)
    chunk = text.encode("utf-8", "surrogatepass")
    chunk += b" " * (-len(chunk) % 4)
    rest = struct.pack("<I", len(chunk)) + b"JSON" + chunk + data[20 + length :]
    path.write_bytes(data[:8] + struct.pack("<I", 12 + len(rest)) + rest)
    return f"{path.name}: JSON of the GLB"


def _cfg_args(path: Path, draw: Random) -> str:
    if draw.random() < 0.4:
        return _text(path, draw)
    call = ast.parse(path.read_text(encoding="utf-8"), mode="eval").body
    values = {word.arg: ast.unparse(word.value) for word in call.keywords}
    literals = (
        *map(repr, STRINGS), *NUMBERS, "None", "True", "[]", "{}", "()", "b''", "{1: 2}", "1j",
        "-" * 3_000 + "1", "[" * 150 + "]" * 150, "(" * DEEP + ")" * DEEP, "'a' 'b'", "1 + 1",
        "__import__('os')", "...", "f'{1}'", "0x" + MANY_DIGITS,
    )  # fmt: skip
    key = draw.choice(["images", "images", *values])
    values[key] = draw.choice(literals)
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    path.write_bytes(f"Namespace({text})".encode("utf-8", "surrogatepass"))
    return f"cfg_args: {key}={values[key][:40]}"


def _by_suffix(path: Path, draw: Random) -> str:
    by_suffix = {".json": _json, ".ply": _ply, ".obj": _text, ".mtl": _text, ".glb": _glb}
    spoil = by_suffix.get(path.suffix, _bytes)
    return spoil(path, draw)


_SCENE = ("vanilla", "vanilla", "vanilla eval", "doctor", "coarse", "render capture", "view model")
_CHECKPOINT = ("coarse", "doctor", "metrics", "export placed")
_RUN_FILES = tuple((f"{folder}/**/[0-9]*.pt", (name,)) for folder, name in RUNS.items())
_RECORDS = tuple((f"{folder}/**/run.json", (name,)) for folder, name in RUNS.items())
_REFINED = (
    "metrics", "metrics", "texture", "pipeline", "export spz", "export placed", "render model",
    "view model",
)  # fmt: skip
_REFINED_FILE = ("out/refined/**/[0-9]*.pt", _REFINED)
# Meshing takes longest.
_MODELS = (("out/coarse/**/[0-9]*.pt", ("mesh",)), _REFINED_FILE, _REFINED_FILE)
_TEXTURED_READERS = (
    "metrics texture", "export glb", "export obj", "export stl", "export usdz", "render textured",
    "view textured",
)  # fmt: skip
_TEXTURED = tuple(
    (f"out/refined_mesh/**/sugar*.{suffix}", _TEXTURED_READERS) for suffix in ("obj", "mtl", "png")
)

KINDS: dict[str, Kind] = {
    "photo": Kind(spoil_photo, (("scene/images/*.*", (*_SCENE, "metrics")),)),
    "nerf photo": Kind(
        spoil_photo,
        (("nerf/train/*.png", ("vanilla nerf",)), ("ngp/images/*.png", ("vanilla ngp",))),
    ),
    "mask": Kind(
        spoil_photo, (("masks/*.*", ("vanilla masked", "vanilla ignoring", "doctor masked")),)
    ),
    "colmap bin": Kind(_bytes, (("scene/sparse/0/*.bin", _SCENE),)),
    "colmap txt": Kind(_text, (("text/sparse/0/*.txt", ("vanilla text", "doctor text")),)),
    "transforms": Kind(
        _json,
        (
            ("nerf/*.json", ("vanilla nerf", "doctor nerf")),
            ("ngp/*.json", ("vanilla ngp", "doctor ngp")),
        ),
    ),
    "gaussians ply": Kind(
        _ply,
        (
            ("vanilla/point_cloud/*/*.ply", ("coarse", "doctor")),
            ("cloud.ply", ("vanilla cloud", "export cloud", "render video", "view cloud")),
        ),
    ),
    "points ply": Kind(
        _ply, (("points.ply", ("vanilla points",)), ("ngp/points.ply", ("vanilla ngp",)))
    ),
    "mesh ply": Kind(_ply, (("mesh.ply", ("refine", "render mesh", "view cloud")),)),
    "exported": Kind(
        _by_suffix,
        tuple(
            (f"exports/{name}", tuple(f"{tool} {name}" for tool in tools))
            for name in EXPORTS
            for tools in [("view",) if name == "mesh.glb" else ("view", "export", "render")]
        ),
    ),
    "camera path": Kind(_json, (("path.json", ("render path",)),)),
    "converted photo": Kind(spoil_photo, (("room/input/*", ("convert",)),)),
    "conversion": Kind(
        _by_suffix,
        (
            ("room/distorted/*.*", ("convert", "convert", "convert given")),
            ("room/distorted/sparse/0/*.bin", ("convert", "convert given")),
        ),
    ),
    "result ply": Kind(_ply, (("out/coarse_mesh/**/*.ply", ("pipeline",)),)),
    "checkpoint bytes": Kind(_bytes, _RUN_FILES, "always"),
    "checkpoint crafted": Kind(spoil_payload, _RUN_FILES, "fallback"),
    "model bytes": Kind(_bytes, _MODELS),
    "model crafted": Kind(spoil_payload, _MODELS),
    "cameras json": Kind(
        _json, (("vanilla/cameras.json", (*_CHECKPOINT, "render capture", "view model")),)
    ),
    "cfg_args": Kind(_cfg_args, (("vanilla/cfg_args", _CHECKPOINT),)),
    "exposures json": Kind(_json, (("vanilla/point_cloud/*/exposure.json", ("coarse exposed",)),)),
    "run json": Kind(
        _json, (*_RECORDS, ("out/**/run.json", ("pipeline", "export placed", "view output")))
    ),
    "note json": Kind(
        _json,
        (
            ("out/coarse_mesh/**/*.json", ("pipeline",)),
            ("out/refined_mesh/**/*.json", ("pipeline",)),
        ),
    ),
    "scenes json": Kind(_json, (("scenes.json", ("metrics",)),)),
    "textured mesh": Kind(_by_suffix, _TEXTURED),
    "truth": Kind(_by_suffix, (("scene/gt.json", ("pipeline",)), ("scene/gt*.ply", ("pipeline",)))),
}
SPECIAL = ("flags", "flags", "names", "in place")
"""Cases that no single kind of file stands for."""

TURNS = (*KINDS, *SPECIAL)
"""Kind of case number k: entry k modulo their number, so that a case is what it is alone, too."""


def kind_of(case: int) -> str:
    """Kind of a case."""
    return TURNS[case % len(TURNS)]


def parts_of(kind: str) -> tuple[str, ...]:
    """Parts of the world that cases of a kind may need; those that cost little are always there."""
    if kind in ("flags", "in place"):
        return ("scene", "nerf", "ngp", "text", "vanilla", "out", "v", "c", "r", "points.ply",
                "cloud.ply", "mesh.ply", "scenes.json", "masks", "room", "exports",
                "path.json")  # fmt: skip
    if kind == "names":
        return ("scene", "vanilla")
    return tuple(dict.fromkeys(p for name in KINDS[kind].commands for p in COMMANDS[name].needs))


def spoil(kind: str, root: Path, draw: Random) -> Plan:
    """Spoil a fresh copy of a world.

    Args:
        kind: Of the case.
        root: The copy.
        draw: Decides everything.
    """
    if kind == "flags":
        command, words, lengthy = spoil_flags(root, draw)
        return Plan(command, words, " ".join(words)[-300:], lengthy)
    if kind == "names":
        command, words, what = spoil_names(root, draw)
        return Plan(command, words, what)
    chosen = KINDS[kind if kind in KINDS else draw.choice(list(KINDS))]
    if not any(any(root.glob(pattern)) for pattern, _ in chosen.reads):
        # A capture from elsewhere may come without a known surface.
        chosen = KINDS["photo"]
    target, command = _target(chosen, root, draw)
    words = words_of(command, root)
    shown = target.relative_to(root).as_posix()
    if kind == "in place":
        what = draw.choice(IN_PLACE)
        put_in_place(target, what)
        return Plan(command, words, f"{what} in place of {shown}")
    if draw.random() < 0.03:
        others = [path for path in sorted(root.rglob("*")) if path.is_file()]
        other = draw.choice(others)
        target.write_bytes(other.read_bytes())
        what = f"{shown} is a copy of {other.relative_to(root)}"
        return Plan(command, words, what)
    what = chosen.spoil(target, draw)
    return Plan(command, words, f"{what} ({shown})", same_bits=chosen.same_bits)


def _target(kind: Kind, root: Path, draw: Random) -> tuple[Path, Command]:
    """A file of the kind, and a command that reads it."""
    pattern, names = draw.choice(kind.reads)
    return draw.choice(sorted(root.glob(pattern))), COMMANDS[draw.choice(names)]


def expects_same_bits(plan: Plan, root: Path, base: Path) -> tuple[Path, Path] | None:
    """The final checkpoint of a continued run, and the undisturbed one that it must equal."""
    folders = [part for part, name in RUNS.items() if name == plan.command.name]
    if plan.same_bits == "never" or not folders:
        return None
    straight = run_folder(base / f"{folders[0]}0")
    newest = max(straight.glob("*.pt"), key=lambda path: int(path.stem))
    return root / folders[0] / newest.relative_to(base / f"{folders[0]}0"), newest
