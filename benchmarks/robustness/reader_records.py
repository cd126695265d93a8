# SPDX-License-Identifier: Apache-2.0
"""Small files beside scenes and results: offsets, exposures, cameras, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import torch

from benchmarks.robustness.facts import EITHER, REFUSED, Facts, Variant
from benchmarks.robustness.reader_gaussians import facts_of_cloud, small_cloud
from benchmarks.robustness.reader_scenes import Capture, facts_of_scene, read_scene, write_colmap
from benchmarks.robustness.scene_variants import drawn_names
from gaussian_splatting.data.world_offset import write_offset
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    point_cloud_path,
    read_exposures,
    write_cameras_json,
    write_cfg_args,
    write_exposures,
)
from gaussian_splatting.scenes.scene import VanillaSize, load_scene, load_scene_for_checkpoint
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.command_line import PROGRAMS
from sugar_utils.errors import Notify
from sugar_utils.files import read_json

_OFFSET = (500_000.0, 4_000_000.0, 100.0)
_SIZE = VanillaSize(-1)
_EXPOSURES = {f"view_{k:02d}.png": torch.tensor([[0.1 * k] * 3, [0.01] * 3]) for k in range(4)}
_SETTINGS: Mapping[str, object] = {
    "source_path": "scene",
    "model_path": "new",
    "iterations": 30,
    "resolution": 2.0,
    "eval": True,
    "masks": "none",
    "save_iterations": [10, 20],
    "depth_weight": 0.25,
}


def write_offset_scene(root: Path) -> None:
    """Write a scene from which an offset was subtracted before."""
    write_colmap(root, Capture(), "bin")
    write_offset(root, np.array(_OFFSET))


def read_offset_scene(root: Path, notify: Notify) -> Facts:
    """Facts of a scene in the coordinates of the original."""
    return read_scene(root, notify)


def offset_variant(root: Path, draw: Random) -> Variant:
    """Write another offset, which moves all places."""
    write_offset_scene(root)
    path = root / "world_offset.json"
    form = draw.choice(("moved", "whole", "bom", "text", "short", "list"))
    shift = (0.0, 0.0, 0.0)
    content: object = {"offset": list(_OFFSET)}
    ends = ("accepted",)
    encoding = "utf-8"
    if form == "moved":
        shift = (draw.choice((-1e5, 0.25, 2e6)), 0.0, 7.0)
        content = {"offset": [a + b for a, b in zip(_OFFSET, shift, strict=True)]}
    elif form == "whole":
        content = {"offset": [int(value) for value in _OFFSET], "other": None}
    elif form == "bom":
        encoding = "utf-8-sig"
    elif form == "text":
        content = {"offset": [str(value) for value in _OFFSET]}
        ends = REFUSED
    else:
        content = {"offset": [1.0, 2.0]} if form == "short" else list(_OFFSET)
        ends = REFUSED
    path.write_text(json.dumps(content), encoding=encoding)
    return Variant(f"offset: {form}", shift=shift, ends=ends)


def write_checkpoint(root: Path) -> None:
    """Write a scene and a vanilla checkpoint of it: ``cfg_args``, ``cameras.json``, exposures."""
    _write_checkpoint(root, Capture())


def _write_checkpoint(root: Path, capture: Capture) -> None:
    write_colmap(root / "scene", capture, "bin")
    scene = load_scene(root / "scene", size_rule=_SIZE, eval_split=False, notify=lambda line: None)
    checkpoint = root / "checkpoint"
    checkpoint.mkdir()
    write_cfg_args(checkpoint, source_path=root / "scene")
    write_cameras_json(checkpoint, scene.original_train_cameras, [])
    write_gaussian_ply(point_cloud_path(checkpoint, 7000), small_cloud())
    write_exposures(checkpoint / "exposure.json", _EXPOSURES)
    if scene.offset.any():
        write_offset(checkpoint, scene.offset)


def read_checkpoint(root: Path, notify: Notify) -> Facts:
    """Facts of a checkpoint, and of its scene in the world of the checkpoint."""
    checkpoint = load_reference_checkpoint(root / "checkpoint", 7000, notify)
    how = {"size_rule": _SIZE, "eval_split": False, "notify": notify}
    images = checkpoint.images_dir
    scene = load_scene_for_checkpoint(root / "scene", checkpoint, images_dir=images, **how)
    exposures = read_exposures(root / "checkpoint" / "exposure.json", notify)
    facts = facts_of_scene(scene)
    cloud = facts_of_cloud(checkpoint.read_cloud(notify), np.zeros(3))
    facts |= {"gaussians": cloud["gaussians"], "opacity": cloud["opacity"]}
    facts["images"] = images
    facts["exposures"] = len(exposures)
    if exposures:
        facts["gain"] = float(torch.stack(list(exposures.values())).mean())
    return facts


def checkpoint_variant(root: Path, draw: Random) -> Variant:
    """Write a checkpoint of photographs by other names, or as another program writes it."""
    form = draw.choice(("names", "names", "foreign", "encoding", "exposures", "far", "cfg_args"))
    if form == "names":
        what, capture = drawn_names(draw)
        _write_checkpoint(root, capture)
        return Variant(f"checkpoint, {what}")
    if form == "far":
        shift = (draw.choice((1e5, 1e6, 4e6)), 2e6, 0.0)
        _write_checkpoint(root, Capture(shift=shift))
        return Variant(f"checkpoint at {shift}", shift=shift)
    write_checkpoint(root)
    folder = root / "checkpoint"
    cameras = folder / "cameras.json"
    changed: Facts = {}
    ends = ("accepted",)
    if form == "foreign":
        entries = json.loads(cameras.read_text(encoding="utf-8"))
        for entry in entries:
            entry["img_name"] = entry["img_name"].removesuffix(".png")
            del entry["cx"], entry["cy"]
        cameras.write_text(json.dumps(entries), encoding="utf-8")
    elif form == "encoding":
        text = cameras.read_text(encoding="utf-8")
        cameras.write_text(text, encoding=draw.choice(("utf-8-sig", "utf-16")))
    elif form == "exposures":
        path = folder / "exposure.json"
        values = draw.choice(({}, {"a": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}))
        path.write_text(json.dumps(values), encoding="utf-8")
        changed = {"exposures": len(values), "gain": 0.0 if values else None}
    else:
        text = "Namespace(eval=False, images='images', source_path='C:\\\\Users\\\\x\\\\scene')"
        (folder / "cfg_args").write_text(
            text, encoding=draw.choice(("utf-8", "utf-8-sig", "utf-16"))
        )
    return Variant(f"checkpoint: {form}", changed=changed, ends=ends)


def write_results(root: Path) -> None:
    """Write a result folder with its ``transform.json``."""
    write_colmap(root / "scene", Capture(), "bin")
    write_gaussian_ply(root / "splats.ply", small_cloud())
    read_results(root, lambda line: None)


def read_results(root: Path, notify: Notify) -> Facts:
    """Facts of a result folder that was completed, or written again."""
    scene = load_scene(root / "scene", size_rule=_SIZE, eval_split=False, notify=notify)
    results = FinalResults(None, root / "splats.ply", small_cloud)
    files = write_result_folder(root / "out", results, scene, PlacementOptions())
    content = read_json(root / "out" / "transform.json")
    matrix = np.array(content["matrix"], float)
    return {
        "files": [path.name for path in files],
        "scale": float(np.linalg.det(matrix[:3, :3])),
        "up": content["up"],
    }


def results_variant(root: Path, draw: Random) -> Variant:
    """Write a folder of which files are missing or of another run."""
    write_results(root)
    form = draw.choice(("no transform", "no splats", "other", "empty"))
    folder = root / "out"
    if form == "no transform":
        (folder / "transform.json").unlink()
    elif form == "no splats":
        (folder / "splats.ply").unlink()
    elif form == "other":
        (folder / "transform.json").write_text("[1, 2]", encoding="utf-8")
    else:
        (folder / "transform.json").write_bytes(b"")
    return Variant(f"results: {form}")


def write_settings_file(root: Path) -> None:
    """Write a file of settings for the vanilla stage."""
    _write_toml(root / "settings.toml", _SETTINGS)


def _write_toml(path: Path, values: Mapping[str, object], encoding: str = "utf-8") -> None:
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
    path.write_text("".join(lines), encoding=encoding)


def read_settings_file(root: Path, notify: Notify) -> Facts:
    """The values of flags that a file of settings gives."""
    parser = PROGRAMS["gaussian_splatting/train.py"].make_parser(None)
    args = vars(parser.parse_args(["--config", str(root / "settings.toml")]))
    facts: Facts = {}
    for name in _SETTINGS:
        value = args[name]
        finite = isinstance(value, (int, float)) and math.isfinite(value)
        facts[name] = value if finite else str(value)
    return facts


def settings_variant(root: Path, draw: Random) -> Variant:
    """Write a file of settings in another form, or with values that flags refuse."""
    path = root / "settings.toml"
    form = draw.choice(("crlf", "bom", "dashes", "text", "unknown", "type", "twice", "table"))
    values = dict(_SETTINGS)
    ends = REFUSED
    if form == "crlf":
        _write_toml(path, values)
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"# end")
        return Variant("settings: crlf")
    if form == "bom":
        _write_toml(path, values, draw.choice(("utf-8-sig", "utf-16")))
        return Variant("settings: bom", ends=("accepted",))
    if form == "dashes":
        values = {name.replace("_", "-"): value for name, value in values.items()}
        ends = EITHER
    elif form == "text":
        values["iterations"] = "30"
        ends = EITHER
    elif form == "unknown":
        values["iteration"] = 3
    elif form == "type":
        values[draw.choice(("iterations", "eval", "depth_weight"))] = draw.choice(
            ([1, 2], "x", "-", [[]])
        )
    _write_toml(path, values)
    if form in ("twice", "table"):
        more = "iterations = 4\n" if form == "twice" else "[iterations]\na = 1\n"
        path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")
    return Variant(f"settings: {form}", ends=ends)
