# SPDX-License-Identifier: Apache-2.0
"""Scenes in other forms: other names and encodings, other numbers, other files of masks and depths.

Every function fills an empty folder, draws from the generator that it is given, and returns what
reading must give.
"""

from __future__ import annotations

import io
import json
import unicodedata
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.robustness.facts import EITHER, REFUSED, Variant
from benchmarks.robustness.reader_scenes import (
    FOCAL,
    HEIGHT,
    N_VIEWS,
    NAMES,
    WIDTH,
    Capture,
    depth_of,
    write_colmap,
    write_depths,
    write_masks,
    write_transforms,
    write_zip,
)

_FAR = (0.0, 1e5, 1e6, 4e6, -5e6)
_SCALES = (1e-3, 0.07, 1.0, 30.0, 1e3)
_LISTS = {"train_filenames": (2, 3, 4), "test_filenames": (0,), "val_filenames": (1, 5)}
_FOREIGN = {
    "gbk": "照片",
    "cp932": "写真",
    "cp949": "사진",
    "cp1252": "Größe",
    "cp1251": "снимок",
    "cp437": "Größe",
    "utf-8": "фото-é-写",
}
"""First letters of names in encodings."""


def drawn_names(draw: Random, ascii_only: bool = False) -> tuple[str, Capture]:
    """Photographs by other names than the cameras have, and how they differ."""
    kinds = ["spaces", "case", "extension", "no extension", "folders", "root", "windows", "dots"]
    kinds += ["brackets", "long", "numbers", "one letter"]
    if not ascii_only:
        kinds += ["decomposed", "composed", "encoding", "encoding", "no utf-8", "upper umlauts"]
        kinds += ["no-break spaces", "right to left"]
    kind = draw.choice(kinds)
    files = list(NAMES)
    stored = [name.encode() for name in NAMES]
    if kind == "spaces":
        files = [f"my scan  {k} (copy).png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "brackets":
        files = [f"view[{k}] #{k}, 100%&;='.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "long":
        files = [f"{'x' * 200}{k}.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "numbers":
        # 10 comes after 9, and stands before 2 as text.
        files = [f"{7 + k}.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "one letter":
        files = [f"{'aBcDeF'[k]}.png" for k in range(N_VIEWS)]
        stored = [name.swapcase().encode() for name in files]
    elif kind == "upper umlauts":
        files = [f"ÄÖÜ ÉÇ_{k}.PNG" for k in range(N_VIEWS)]
        stored = [name.lower().encode() for name in files]
    elif kind == "no-break spaces":
        files = [f"scan\u00a0{k}\u3000a.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "right to left":
        files = [f"صورة {k}.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "case":
        stored = [name.upper().encode() for name in files]
    elif kind == "extension":
        suffix = draw.choice([".jpg", ".JPG", ".jpeg", ".tif"])
        stored = [name.replace(".png", suffix).encode() for name in files]
    elif kind == "no extension":
        stored = [name.removesuffix(".png").encode() for name in files]
    elif kind == "folders":
        files = [f"{'left' if k % 2 else 'right'}/{k}.png" for k in range(N_VIEWS)]
        stored = [name.encode() for name in files]
    elif kind == "root":
        stored = [f"/home/anna/scans/images/{name}".encode() for name in files]
    elif kind == "windows":
        stored = [f"C:\\Users\\Anna\\scan 1\\images\\{name}".encode() for name in files]
    elif kind == "dots":
        files = [f"view.{k}.{'final' if k % 2 else 'v2'}.png" for k in range(N_VIEWS)]
        stored = [f"./{name}".encode() for name in files]
    elif kind in ("decomposed", "composed"):
        forms = ("NFD", "NFC") if kind == "decomposed" else ("NFC", "NFD")
        names = [f"vüé ö_{k}.png" for k in range(N_VIEWS)]
        files = [unicodedata.normalize(forms[0], name) for name in names]
        stored = [unicodedata.normalize(forms[1], name).encode() for name in names]
    elif kind == "encoding":
        encoding = draw.choice(list(_FOREIGN))
        files = [f"{_FOREIGN[encoding]}_{k}.png" for k in range(N_VIEWS)]
        stored = [name.encode(encoding) for name in files]
        kind = f"encoding {encoding}"
    elif kind == "no utf-8":
        # As a ZIP file from Windows leaves them on Linux.
        raw = [f"Größe_{k}.png".encode("cp1252") for k in range(N_VIEWS)]
        files = [name.decode("utf-8", "surrogateescape") for name in raw]
        stored = draw.choice([raw, [f"Größe_{k}.png".encode() for k in range(N_VIEWS)]])
    return f"names: {kind}", Capture(files=tuple(files), stored=tuple(stored))


def _reduced(root: Path, draw: Random) -> str:
    """Halve the photographs after their cameras were found, or give them another mode."""
    form = draw.choice(("half", "RGBA", "P", "16 bits", "JPEG"))
    for path in sorted((root / "images").iterdir()):
        with Image.open(path) as image:
            image.load()
        if form == "half":
            image.resize((WIDTH // 2, HEIGHT // 2)).save(path, "PNG")
        elif form == "JPEG":
            image.save(path, "JPEG", quality=95)
        elif form == "16 bits":
            # Red alone tells the views apart.
            red = np.asarray(image)[..., 0].astype(np.uint16) * 257
            Image.fromarray(red).save(path, "PNG")
        else:
            image.convert(form).save(path, "PNG")
    return form


def colmap_variant(kind: str) -> Callable[[Path, Random], Variant]:
    """Writers of variants of COLMAP models, ``bin`` or ``txt``."""

    def write(root: Path, draw: Random) -> Variant:
        chosen = draw.randrange(5)
        if chosen == 4:
            write_colmap(root, Capture(), kind)
            _write_maps(root, Capture())
            form = _reduced(root, draw)
            lens = [WIDTH // 2, HEIGHT // 2, FOCAL / 2, FOCAL / 2]
            changed = {f"view {k} lens": lens for k in range(N_VIEWS)} if form == "half" else {}
            return Variant(f"photographs: {form}", changed=changed)
        if chosen < 2:
            what, capture = drawn_names(draw)
            write_colmap(root, capture, kind)
            _write_maps(root, capture)
            return Variant(what)
        capture, variant = _moved(draw)
        write_colmap(root, capture, kind)
        _write_maps(root, capture)
        return variant

    return write


def _write_maps(root: Path, capture: Capture) -> None:
    """Masks, depth and confidence maps, called like the photographs."""
    write_masks(root / "masks", capture.files)
    write_depths(root / "depths", capture.files, root / "confidence")


def _moved(draw: Random) -> tuple[Capture, Variant]:
    scale = draw.choice(_SCALES)
    shift = (draw.choice(_FAR), draw.choice(_FAR), draw.choice((0.0, 500.0)))
    variant = Variant(f"{scale} times as large at {shift}", scale, shift)
    return Capture(scale=scale, shift=shift), variant


def transforms_variant(root: Path, draw: Random) -> Variant:
    """Write a variant of ``transforms.json``."""
    chosen = draw.randrange(4)
    if chosen == 0:
        what, capture = drawn_names(draw, ascii_only=draw.random() < 0.3)
        lists = replace(capture, lists=_LISTS)
        if "utf-8" in what:
            # A JSON file has one encoding.
            lists = replace(lists, files=NAMES, stored=Capture().stored)
        encoding = what.rsplit(" ", 1)[-1] if "encoding" in what else "utf-8"
        write_transforms(root, lists, encoding)
        return Variant(what)
    if chosen == 1:
        capture, variant = _moved(draw)
        write_transforms(root, replace(capture, lists=_LISTS))
        return variant
    write_transforms(root, Capture(lists=_LISTS))
    path = root / "transforms.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    form = draw.choice(("bom", "utf-16", "rows", "text", "keys", "lists", "frames", "extras"))
    ends = ("accepted",)
    changed = {}
    encoding = "utf-8"
    if form == "bom":
        encoding = "utf-8-sig"
    elif form == "utf-16":
        encoding = "utf-16"
    elif form == "rows":
        for frame in content["frames"]:
            frame["transform_matrix"] = frame["transform_matrix"][:3]
    elif form == "text":
        content[draw.choice(("w", "fl_x", "cx"))] = str(content["w"])
        ends = REFUSED
    elif form == "keys":
        content |= {"aabb_scale": 16, "applied_transform": [[1, 0, 0, 0]], "unknown": None}
    elif form == "lists":
        for key in _LISTS:
            content[key] = [f"./{name}" for name in content[key]]
    elif form == "frames":
        lens = ("w", "h", "fl_x", "fl_y", "cx", "cy")
        for frame in content["frames"]:
            frame.update({key: content[key] for key in lens})
        content = {key: value for key, value in content.items() if key not in lens}
    else:
        content["frames"].reverse()
    path.write_bytes(json.dumps(content, ensure_ascii=False).encode(encoding))
    return Variant(f"transforms.json: {form}", changed=changed, ends=ends)


def mask_variant(root: Path, draw: Random) -> Variant:
    """Write masks with other values, types and names."""
    write_colmap(root, Capture(), "bin")
    folder = root / "masks"
    form = draw.choice(("values", "values", "labels", "names", "numbers", "mode", "mode", "black"))
    if form == "values":
        value = draw.randrange(2, 128)
        write_masks(folder, NAMES, (value,))
        return Variant(f"masks of 0 and {value}")
    if form == "labels":
        labels = sorted(draw.sample(range(1, 60), draw.randrange(2, 6)))
        write_masks(folder, NAMES, labels)
        return Variant(f"masks of labels {labels}")
    if form == "names":
        pattern = draw.choice(("{0}.png", "{1}_mask.png", "{1}.PNG", "{0}_mask.png", "x/y/{1}.png"))
        names = [pattern.format(name, Path(name).stem) for name in NAMES]
        write_masks(folder, names)
        return Variant(f"masks called {names[0]}")
    if form == "numbers":
        pattern, first = draw.choice((("{}.png", 0), ("{}.png", 1), ("{:03d}.png", 0)))
        write_masks(folder, [pattern.format(first + k) for k in range(N_VIEWS)])
        # View 1 to 6 of photographs 0 to 5 is a place, not a number.
        return Variant(f"masks called {pattern} from {first}", ends=EITHER if first else _OK)
    if form == "black":
        write_masks(folder, NAMES, (0,))
        return Variant("masks are black", ends=REFUSED)
    mode = draw.choice(("1", "P", "LA", "RGB", "RGBA", "I;16", "F", "coloured labels"))
    write_masks(folder, NAMES)
    for name in NAMES:
        _convert_mask(folder / name, mode)
    return Variant(f"masks of mode {mode}")


_OK = ("accepted",)


def _convert_mask(path: Path, mode: str) -> None:
    with Image.open(path) as image:
        values = np.asarray(image)
    if mode == "I;16":
        image = Image.fromarray(values.astype(np.uint16) * 257)
    elif mode == "F":
        path.unlink()
        Image.fromarray(values.astype(np.float32) / 255).save(path.with_suffix(".tif"))
        return
    elif mode == "coloured labels":
        colors = np.zeros((*values.shape, 3), np.uint8)
        colors[values > 0] = (0, 90, 200)
        columns = np.arange(values.shape[1]) % 2 == 1
        colors[(values > 0) & columns] = (180, 0, 10)
        image = Image.fromarray(colors)
    else:
        image = Image.fromarray(values).convert(mode)
    image.save(path, "PNG")


def depth_variant(root: Path, draw: Random) -> Variant:
    """Write depth maps of other types, in other units and files."""
    write_colmap(root, Capture(), "bin")
    folder, confidence = root / "depths", root / "confidence"
    unit = draw.choice((1.0, 10.0, 5000.0, 1000.0))
    form = draw.choice(("npy", "npy", "tiff", "png", "reciprocal", "confidence", "stored", "names"))
    folder.mkdir()
    if form == "names":
        what, capture = drawn_names(draw)
        for path in sorted((root / "images").iterdir()):
            path.unlink()
        (root / "sparse").rename(root / "old")
        write_colmap(root, capture, "bin")
        write_depths(folder, capture.files)
        return Variant(f"depth maps, {what}")
    kind = draw.choice(("<f4", ">f4", "<f8", "<f2", "<u2", ">u2", "<i4", "<u4"))
    if kind[1] in "ui":
        unit = draw.choice((1000.0, 4000.0))
    for number, name in enumerate(NAMES):
        depth = depth_of(number)
        stem = folder / Path(name).stem
        if form == "npy":
            values = _as_type(depth * unit, kind)
            shaped = draw.choice(
                (values, values[..., None], values[None], np.asfortranarray(values))
            )
            np.save(stem.with_suffix(".npy"), shaped)
        elif form == "tiff":
            values = _as_type(depth * unit, "<u2" if kind[1] in "ui" else "<f4")
            Image.fromarray(values).save(stem.with_suffix(".tif"))
        elif form == "png":
            whole = Image.fromarray(_as_type(depth * 1000, "<u2"))
            size = draw.choice(((WIDTH, HEIGHT), (WIDTH * 3, HEIGHT * 3)))
            whole.resize(size, Image.Resampling.NEAREST).save(stem.with_suffix(".png"))
        elif form == "reciprocal":
            np.save(stem.with_suffix(".npy"), (30 / depth + 4).astype(np.float32))
        elif form == "stored":
            hole = depth * unit if kind[1] == "f" else depth
            hole[:4] = draw.choice((np.nan, np.inf, -1.0, 0.0))
            np.save(stem.with_suffix(".npy"), hole.astype(np.float32))
        else:
            np.save(stem.with_suffix(".npy"), depth.astype(np.float32))
            confidence.mkdir(exist_ok=True)
            most = draw.choice((2, 255))
            np.save(confidence / f"{Path(name).stem}.npy", np.full(depth.shape, most, np.uint8))
    return Variant(f"depth maps: {form}, {kind}, {unit} in a unit", changed=_depths(form))


def _as_type(values: np.ndarray, kind: str) -> np.ndarray:
    return np.rint(values).astype(kind) if kind[1] in "ui" else values.astype(kind)


def _depths(form: str) -> dict[str, float]:
    """Medians that change where some rows are unknown or pixels have other places."""
    if form != "stored":
        return {}
    medians = {}
    for number in range(N_VIEWS):
        depth = depth_of(number)
        depth[:4] = 0.0
        medians[f"view {number} depth length"] = float(np.median(depth))
    return medians


def zip_variant(root: Path, draw: Random) -> Variant:
    """Write a scene as a ZIP file of another form, or one that must be refused."""
    scene = root / "scan"
    forms = (
        "method",
        "method",
        "flat",
        "deep",
        "macos",
        "backslashes",
        "names",
        "escape",
        "twice",
        "encrypted",
        "empty",
        "link",
        "bomb",
    )
    form = draw.choice(forms)
    path = root / "scan.zip"
    if form == "names":
        what, capture = drawn_names(draw)
        write_colmap(scene, capture, "bin")
        if any("\udc80" <= character <= "\udcff" for name in capture.files for character in name):
            # zipfile writes no such names.
            return Variant("", ends=("skipped",))
        write_zip(path, scene)
        return Variant(f"ZIP, {what}")
    write_colmap(scene, Capture(), "bin")
    if form == "method":
        method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        write_zip(path, scene, method)
        return Variant(f"ZIP of method {method}")
    write_zip(path, scene)
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    if form == "flat":
        files = {name.removeprefix("scan/"): content for name, content in files.items()}
    elif form == "deep":
        files = {f"a/b c/{name}": content for name, content in files.items()}
    elif form == "macos":
        files |= {f"__MACOSX/{Path(n).parent}/._{Path(n).name}": b"x" for n in list(files)}
        files |= {"scan/.DS_Store": b"x"}
    elif form == "backslashes":
        files = {name.replace("/", "\\"): content for name, content in files.items()}
    elif form == "escape":
        files[draw.choice(("../../evil.txt", "/tmp/evil.txt", "C:\\evil.txt"))] = b"x"
    elif form == "empty":
        files = {}
    elif form == "bomb":
        files["scan/zeros.bin"] = bytes(1 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
        if form == "twice":
            archive.writestr(zipfile.ZipInfo("scan/./images/view_00.png"), b"x")
        if form == "link":
            info = zipfile.ZipInfo("scan/link")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
    content = bytearray(buffer.getvalue())
    if form == "encrypted":
        at = content.rindex(b"PK\x01\x02")
        content[at + 8] |= 1
    if form == "bomb":
        # A size that no file has, in the list at the end.
        at = content.rindex(b"PK\x01\x02")
        content[at + 24 : at + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(bytes(content))
    refused = form in ("escape", "twice", "encrypted", "empty", "link", "bomb")
    return Variant(f"ZIP: {form}", ends=REFUSED if refused else _OK)
