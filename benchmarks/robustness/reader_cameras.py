# SPDX-License-Identifier: Apache-2.0
"""Cameras as other programs write them, valid and in other forms.

``photographs.json`` beside them has the names of the photographs that they belong to.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.robustness.facts import Facts, Variant
from sugar_capture.known_cameras import read_cameras, the_cameras
from sugar_utils.errors import Notify
from tests.support import camera_files
from tests.support.camera_files import CENTERS, CSV_HEADER, NAMES, ROTATIONS

PROGRAMS = (
    "metashape",
    "metashape rig",
    "realityscan csv",
    "realityscan xmp",
    "bundler",
    "openmvg",
    "opensfm",
    "polycam",
    "record3d",
)
_LIST = "photographs.json"
_SHIFTS = (0.0, 1e5, 1e6, -4e6)
_SCALES = (1e-3, 1.0, 1e3)
_COLUMNS = (
    "Name,X,Y,Altitude,Yaw,Pitch,Roll,Focal Length,PX,PY,K1,K2,K3,K4,T1,T2\n",
    "image_name,easting,northing,height,heading,pitch,roll,f35,ppx,ppy,k1,k2,k3,k4,t1,t2\n",
    '"#name","x","y","alt","heading","pitch","roll","f","px","py","k1","k2","k3","k4","t1","t2"\n',
)


def write_cameras(
    root: Path,
    program: str,
    names: Sequence[str] = NAMES,
    scale: float = 1.0,
    shift: Sequence[float] = (0, 0, 0),
    photographs: Sequence[str] | None = None,
) -> None:
    """Write the cameras of a program, and the names of the photographs that are there.

    Args:
        photographs: Names of the photographs; None for those that the cameras have.
    """
    poses = list(zip(ROTATIONS, CENTERS * scale + np.array(shift), strict=True))
    names = list(names)
    if program == "metashape":
        text = camera_files.metashape(poses, names)
        (root / "cameras.xml").write_text(text, encoding="utf-8")
    elif program == "metashape rig":
        tree = camera_files.rig_xml(poses, names)
        (root / "cameras.xml").write_bytes(ET.tostring(tree, encoding="utf-8"))
    elif program == "realityscan csv":
        text = CSV_HEADER + camera_files.reality_rows(",", poses, names)
        (root / "cameras.csv").write_text(text, encoding="utf-8")
    elif program == "realityscan xmp":
        for name, pose in zip(names, poses, strict=True):
            path = root / f"{Path(name).stem}.xmp"
            path.write_text(camera_files.xmp(*pose), encoding="utf-8")
    elif program == "bundler":
        camera_files.bundler(root, poses, names)
    elif program == "openmvg":
        content = camera_files.openmvg({"disto_k3": [0.03, -0.02, 0.005]}, False, poses, names)
        (root / "sfm_data.json").write_text(json.dumps(content), encoding="utf-8")
    elif program == "opensfm":
        content = camera_files.opensfm(
            {"projection_type": "perspective", "focal": 0.8}, poses, names
        )
        (root / "reconstruction.json").write_text(json.dumps(content), encoding="utf-8")
    elif program == "polycam":
        camera_files.polycam(root, True, poses, names)
    else:
        content = camera_files.record3d(poses)
        (root / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
        names = [f"{number}.jpg" for number in range(len(poses))]
    (root / _LIST).write_text(json.dumps(list(photographs or names)), encoding="utf-8")


def read_program(root: Path, notify: Notify) -> Facts:
    """Facts of the cameras, by the place of the photograph in the list."""
    names = json.loads((root / _LIST).read_text(encoding="utf-8"))
    source = the_cameras(None, root)
    if source is None:
        notify("no cameras of another program")
        return {}
    known = read_cameras(source, camera_files.photographs(names))
    offset = np.zeros(3) if known.offset is None else np.array(known.offset)
    facts: Facts = {}
    for photograph, camera in zip(known.photographs, known.cameras, strict=True):
        view = f"view {names.index(photograph.name)}"
        facts[f"{view} place"] = (camera.center + offset).tolist()
        facts[f"{view} rotation"] = camera.rotation.ravel().tolist()
        facts[f"{view} lens"] = [
            camera.lens.width,
            camera.lens.height,
            *map(float, camera.lens.params),
        ]
    for line in known.notes:
        notify(line)
    return facts


def cameras_variant(program: str) -> Callable[[Path, Random], Variant]:
    """Writers of variants of the cameras of a program."""

    def write(root: Path, draw: Random) -> Variant:
        form = draw.choice(("moved", "names", "names", "text"))
        if form == "moved":
            scale = draw.choice(_SCALES)
            shift = (draw.choice(_SHIFTS), draw.choice(_SHIFTS), 0.0)
            write_cameras(root, program, NAMES, scale, shift)
            return Variant(f"{scale} times as large at {shift}", scale, shift)
        if form == "names" and program != "record3d":
            what, names, photographs = _names(draw, program)
            write_cameras(root, program, names, photographs=photographs)
            return Variant(what)
        write_cameras(root, program)
        if program == "realityscan csv":
            return _table_variant(root, draw)
        change = draw.choice(("bom", "crlf"))
        for path in _text_files(root):
            text = path.read_text(encoding="utf-8")
            encoding = "utf-8-sig" if change == "bom" else "utf-8"
            newline = "\r\n" if change == "crlf" else "\n"
            path.write_text(text, encoding=encoding, newline=newline)
        return Variant(change)

    return write


def _text_files(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != _LIST]


def _names(draw: Random, program: str) -> tuple[str, list[str], list[str]]:
    """Names as the program spells them, and names of the photographs."""
    kind = draw.choice(("spaces", "umlauts", "decomposed", "case", "extension", "folders", "dots"))
    numbers = range(len(NAMES))
    if kind == "spaces":
        names = [f"scan 1 {k} (copy).jpg" for k in numbers]
        return kind, names, names
    if kind == "dots":
        names = [f"DJI.{k}.v2.jpg" for k in numbers]
        return kind, names, names
    if kind == "umlauts":
        names = [f"Größe 写真 {k}.jpg" for k in numbers]
        return kind, names, names
    if kind == "decomposed":
        return kind, [f"vu\u0308 {k}.jpg" for k in numbers], [f"v\u00fc {k}.jpg" for k in numbers]
    if kind == "case":
        return kind, [name.lower() for name in NAMES], [name.upper() for name in NAMES]
    if kind == "extension":
        return kind, list(NAMES), [name.replace(".jpg", ".png") for name in NAMES]
    # Programs that name one file for each photograph leave its folders out.
    flat = program in ("realityscan xmp", "polycam")
    names = list(NAMES) if flat else [f"left/{name}" for name in NAMES]
    return kind, names, [f"left/{name}" for name in NAMES]


def _table_variant(root: Path, draw: Random) -> Variant:
    """Write the table of RealityScan with other columns, separators and rows."""
    path = root / "cameras.csv"
    form = draw.choice(("columns", "semicolons", "tabs", "bom", "rows", "quotes", "text"))
    rows = camera_files.reality_rows(",")
    header = CSV_HEADER
    changed = {}
    encoding = "utf-8"
    ends = ("accepted",)
    if form == "columns":
        header = draw.choice(_COLUMNS)
    elif form == "tabs":
        header = header.replace(",", "\t")
        rows = camera_files.reality_rows("\t")
    elif form == "semicolons":
        header = header.replace(",", ";")
        rows = camera_files.reality_rows(";").replace(".jpg", "_jpg").replace(".", ",")
        rows = rows.replace("_jpg", ".jpg")
    elif form == "bom":
        encoding = draw.choice(("utf-8-sig", "utf-16"))
    elif form == "rows":
        lines = rows.splitlines()
        fields = lines[0].split(",")
        lines[0] = ",".join([*fields[:4], "", "", "", *fields[7:]])
        rows = "\n".join([*lines, "", ",,,", "else.jpg,1,2,3,,,,27", ""])
        changed = {f"view 0 {fact}": None for fact in ("place", "rotation", "lens")}
    elif form == "quotes":
        rows = rows.replace("IMG_", '"IMG_').replace(".jpg", '.jpg"')
    else:
        rows = rows.replace("IMG_1.jpg,", "IMG_1.jpg,x")
        ends = ("refused",)
    path.write_text(header + rows, encoding=encoding)
    return Variant(f"table: {form}", changed=changed, ends=ends)
