# SPDX-License-Identifier: Apache-2.0
"""Files of Gaussians, valid and in other forms, and tables of PLY files."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.lib.recfunctions import repack_fields
from plyfile import PlyData, PlyElement

from benchmarks.robustness.facts import EITHER, REFUSED, Facts, Variant
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh, sh_to_rgb
from gaussian_splatting.formats.ply import holds_gaussians, read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from gaussian_splatting.formats.spz import AXES, write_spz
from sugar_extractors.export.gltf_gaussians import write_gltf_gaussians
from sugar_extractors.export.reading import has_gaussians, read_gaussians_in_scene
from sugar_extractors.export.usd.gaussians import write_usd_gaussians
from sugar_utils.errors import Notify, UserError
from tests.support.gaussian_files import record, with_records, write_compressed

N = 80
OFFSET_FILE = "offset.txt"
SHIFTS = (0.0, 1e5, 1e6, -4e6)
SCALES = (1e-3, 0.07, 30.0, 1e3)


def small_cloud(scale: float = 1.0) -> GaussianCloud:
    """Gaussians around the origin, so many times as large, that all formats can hold."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return GaussianCloud(
        means=normal(N, 3) * scale,
        sh_dc=normal(N, 1, 3).clamp(-1.5, 1.5),
        sh_rest=(normal(N, 15, 3) * 0.2).clamp(-0.8, 0.8),
        opacity_logits=normal(N, 1),
        log_scales=normal(N, 3) * 0.3 - 3 + float(np.log(scale)),
        quats=torch.nn.functional.normalize(normal(N, 4), dim=1),
    )


def _write_spz2(path: Path, cloud: GaussianCloud) -> None:
    """Version 2, which differs from 3 in its rotations: x, y and z in a byte each."""
    write_spz(path, cloud)
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[4:8] = struct.pack("<I", 2)
    first = 16 + len(cloud) * 16
    quats = torch.nn.functional.normalize(cloud.quats, dim=1)
    quats = torch.where(quats[:, :1] < 0, -quats, quats)[:, 1:].numpy()
    three = np.rint((quats + 1) * 127.5).clip(0, 255).astype(np.uint8)
    content[first : first + 4 * len(cloud)] = three.tobytes()
    path.write_bytes(gzip.compress(bytes(content), mtime=0))


def _write_spz4(path: Path, cloud: GaussianCloud) -> None:
    write_spz(path, cloud, version=4)


FORMATS: Mapping[str, Callable[[Path, GaussianCloud], object]] = {
    "a.ply": write_gaussian_ply,
    "b.compressed.ply": lambda path, cloud: write_compressed(path, cloud, 3),
    "c.spz": write_spz,
    "d.spz": _write_spz2,
    "e.spz": _write_spz4,
    "f.sog": write_sog,
    "g.splat": write_splat,
    "h.gltf.glb": write_gltf_gaussians,
    "i.usd": write_usd_gaussians,
}
"""Writers by the names of the files."""

_NO_BANDS = ("g.splat",)


def write_format(name: str) -> Callable[[Path], None]:
    """Return the writer of a valid file of one of ``FORMATS``."""

    def write(root: Path) -> None:
        FORMATS[name](root / name, small_cloud())

    return write


def read_format(name: str) -> Callable[[Path, Notify], Facts]:
    """Return the reader of one of ``FORMATS``."""

    def read(root: Path, notify: Notify) -> Facts:
        path = root / name
        offset = np.zeros(3)
        if (root / OFFSET_FILE).is_file():
            offset = np.loadtxt(root / OFFSET_FILE)
        if name.endswith(".ply"):
            if not holds_gaussians(path):
                raise UserError(f"{path}: holds no Gaussians; choose another file")
            return facts_of_cloud(read_gaussian_ply(path, notify, offset), offset)
        if not has_gaussians(path):
            raise UserError(f"{path}: holds no Gaussians; choose another file")
        return facts_of_cloud(read_gaussians_in_scene(path, notify), offset)

    return read


def facts_of_cloud(cloud: GaussianCloud, offset: np.ndarray) -> Facts:
    """Facts of Gaussians that do not depend on their order."""
    means = cloud.means.double().numpy()
    values = {name: tensor.numpy() for name, tensor in cloud.tensors().items()}
    with np.errstate(over="ignore"):
        sizes = np.exp(values["log_scales"].astype(np.float64)).mean(axis=0)
    return {
        "gaussians": len(cloud),
        "middle place": (means.mean(axis=0) + offset).tolist(),
        "spread length": means.std(axis=0).tolist(),
        "sizes length": sizes.tolist(),
        "opacity": float(torch.sigmoid(cloud.opacity_logits).mean()),
        "color": values["sh_dc"].mean(axis=(0, 1), dtype=np.float64).tolist(),
        "bands": values["sh_rest"].mean(axis=(0, 1), dtype=np.float64).tolist(),
        "antialiased": int(cloud.antialiased),
    }


def gaussians_variant(name: str) -> Callable[[Path, Random], Variant]:
    """Writers of variants of one of ``FORMATS``."""

    def write(root: Path, draw: Random) -> Variant:
        path = root / name
        form = draw.choice(("scale", "antialiased", "zero", "opaque", "own", "own"))
        if form == "scale":
            scale = draw.choice(SCALES)
            try:
                FORMATS[name](path, small_cloud(scale))
            except UserError:
                # The writer says that the format cannot hold it.
                return Variant("", ends=("skipped",))
            return Variant(f"{scale} times as large", scale)
        cloud = small_cloud()
        if form == "antialiased" and not name.endswith(("compressed.ply", ".splat")):
            FORMATS[name](path, replace(cloud, antialiased=True))
            return Variant("antialiased", changed={"antialiased": 1})
        if form == "opaque":
            cloud.opacity_logits[: N // 2] = 60.0
            cloud.opacity_logits[N // 2 :] = -60.0
            FORMATS[name](path, cloud)
            return Variant("opacities of 0 and 1", changed={"opacity": 0.5})
        if form == "zero":
            return _without_gaussians(path, cloud)
        if name == "a.ply":
            return _ply_variant(root, path, draw)
        if name.endswith(".spz"):
            return _spz_variant(path, cloud, draw)
        if name == "b.compressed.ply":
            return _compressed_variant(path, cloud, draw)
        if name.endswith(".glb"):
            return _gltf_variant(path, cloud, draw)
        FORMATS[name](path, cloud)
        return Variant("as it was")

    return write


def _without_gaussians(path: Path, cloud: GaussianCloud) -> Variant:
    """A file of no Gaussians, where its writer makes one or its header can say so."""
    name = path.name
    if name == "a.ply":
        write_gaussian_ply(path, cloud.select(torch.zeros(N, dtype=torch.bool)))
    elif name == "g.splat":
        path.write_bytes(b"")
    elif name in ("c.spz", "d.spz"):
        FORMATS[name](path, cloud)
        content = bytearray(gzip.decompress(path.read_bytes()))
        content[8:12] = bytes(4)
        path.write_bytes(gzip.compress(bytes(content[:16])))
    else:
        path.write_bytes(b"")
    return Variant("no Gaussians", ends=REFUSED)


def _compressed_variant(path: Path, cloud: GaussianCloud, draw: Random) -> Variant:
    bands = draw.randrange(4)
    cloud.sh_rest[:, (bands + 1) ** 2 - 1 :] = 0
    with_bounds = draw.random() < 0.5
    changed: Facts = {"bands": facts_of_cloud(cloud, np.zeros(3))["bands"]}
    if not with_bounds:
        # Colours without bounds are from 0 to 1.
        cloud.sh_dc.clamp_(-1.7, 1.7)
    write_compressed(path, cloud, bands, with_bounds)
    return Variant(f"{bands} bands, bounds of colours: {with_bounds}", changed=changed)


def _gltf_variant(path: Path, cloud: GaussianCloud, draw: Random) -> Variant:
    """A glTF whose opacities and rotations are whole numbers, or whose JSON is spaced."""
    write_gltf_gaussians(path, cloud)
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    content = json.loads(data[20 : 20 + length])
    binary = bytearray(data[28 + length :])
    form = draw.choice(("bytes", "shorts", "spaces", "names", "moved", "two"))
    attributes = content["meshes"][0]["primitives"][0]["attributes"]
    ends = ("accepted",)
    if form in ("bytes", "shorts"):
        kind, number, most = (np.uint8, 5121, 255) if form == "bytes" else (np.uint16, 5123, 65535)
        values = torch.sigmoid(cloud.opacity_logits).numpy().ravel()
        raw = np.rint(values * most).astype(kind).tobytes()
        view = {"buffer": 0, "byteOffset": len(binary), "byteLength": len(raw)}
        accessor = {
            "bufferView": len(content["bufferViews"]),
            "componentType": number,
            "count": len(values),
            "type": "SCALAR",
            "normalized": True,
        }
        opacity = next(name for name in attributes if name.endswith("OPACITY"))
        attributes[opacity] = len(content["accessors"])
        content["bufferViews"].append(view)
        content["accessors"].append(accessor)
        binary += raw + b"\0" * (-len(raw) % 4)
        content["buffers"][0]["byteLength"] = len(binary)
    elif form == "names":
        content["nodes"][0]["name"] = "Größe 写真"
        content["extras"] = {"a": [None, {}]}
    elif form == "moved":
        content["nodes"][0]["translation"] = [1.0, 2.0, 3.0]
        ends = REFUSED
    elif form == "two":
        content["meshes"][0]["primitives"] *= 2
        ends = REFUSED
    text = json.dumps(content, indent=2 if form == "spaces" else None, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 4)
    chunks = struct.pack("<I", len(text)) + b"JSON" + text
    chunks += struct.pack("<I", len(binary)) + b"BIN\0" + binary
    path.write_bytes(data[:8] + struct.pack("<I", 12 + len(chunks)) + chunks)
    return Variant(f"glTF: {form}", ends=ends)


def _spz_variant(path: Path, cloud: GaussianCloud, draw: Random) -> Variant:
    FORMATS[path.name](path, cloud)
    payloads = {
        "axes of the format": record(AXES, struct.pack("<I", 4)),
        "unknown axes": record(AXES, struct.pack("<I", draw.choice((17, 99, 2**31)))),
        "no axes": record(AXES, b""),
        "an unknown record": record(0x12345678, draw.randbytes(30)),
        "two records": record(0xADBE0002, bytes(12)) + record(AXES, bytes(4)),
        "a record that is cut": struct.pack("<II", AXES, 400),
        "a length of 4 GiB": struct.pack("<II", AXES, 0xFFFFFFFF),
    }
    what = draw.choice(list(payloads))
    with_records(path, payloads[what])
    return Variant(f"extension: {what}")


def _ply_variant(root: Path, path: Path, draw: Random) -> Variant:
    """A PLY of Gaussians with other properties, or far from the origin."""
    write_gaussian_ply(path, small_cloud())
    table = table_of(path)
    forms = (
        "ascii",
        "big",
        "double",
        "order",
        "extra",
        "colors",
        "float colors",
        "infinite",
        "nan",
        "list",
        "a needed list",
        "list of bands",
        "elements",
        "bands",
        "far",
        "quats",
        "filter",
        "upper case",
        "2D",
    )
    form = draw.choice(forms)
    names = list(table.dtype.names)
    changed: Facts = {}
    ends = ("accepted",)
    if form == "ascii":
        write_table(path, table, text=True)
    elif form == "big":
        write_table(path, table, order=">")
    elif form == "double":
        write_table(path, table.astype([(name, "<f8") for name in names]))
    elif form == "order":
        draw.shuffle(names)
        write_table(path, columns_of(table, names))
    elif form == "extra":
        write_table(path, with_column(table, "label_0", "i4", 7))
    elif form in ("colors", "float colors"):
        colors = sh_to_rgb(np.stack([table[f"f_dc_{k}"] for k in range(3)], axis=1))
        remaining = columns_of(table, [name for name in names if not name.startswith("f_dc")])
        whole = form == "colors"
        for number, color in enumerate(("red", "green", "blue")):
            values = np.rint(colors[:, number] * 255).clip(0, 255) if whole else colors[:, number]
            remaining = with_column(remaining, color, "u1" if whole else "f4", values)
        changed["color"] = mean_color(colors, whole)
        write_table(path, remaining)
    elif form == "infinite":
        table["opacity"][: N // 2] = np.inf
        table["opacity"][N // 2 :] = draw.choice((-np.inf, -300.0))
        changed["opacity"] = 0.5
        write_table(path, table, text=draw.random() < 0.3)
    elif form == "nan":
        rows = draw.sample(range(N), 3)
        table[draw.choice(("x", "scale_1", "f_dc_0", "rot_2"))][rows] = draw.choice(
            (np.nan, np.inf)
        )
        remaining = np.delete(table, rows)
        write_table(path, remaining)
        # What is left is what a file without these rows has.
        changed = dict(read_format(path.name)(root, lambda line: None))
        write_table(path, table)
    elif form in ("list", "a needed list", "list of bands"):
        chosen = {"list": "extra", "list of bands": draw.choice(("f_rest_3", "filter_3D"))}
        column = chosen.get(form) or draw.choice(("x", "opacity", "scale_0", "rot_3", "f_dc_1"))
        write_lists(path, table, column)
        ends = ("accepted",) if form == "list" else REFUSED
    elif form == "elements":
        others = np.zeros(3, [("a", "f4"), ("b", "i4")])
        elements = [PlyElement.describe(others, "camera"), PlyElement.describe(table, "vertex")]
        PlyData(elements).write(str(path))
    elif form == "bands":
        n_bands = draw.choice((0, 9, 24))
        cloud = small_cloud()
        cloud.sh_rest[:, n_bands // 3 :] = 0
        write_gaussian_ply(path, cloud)
        changed["bands"] = facts_of_cloud(cloud, np.zeros(3))["bands"]
        table = table_of(path)
        rest = cloud.sh_rest[:, : n_bands // 3].transpose(1, 2).flatten(1).numpy()
        remaining = columns_of(table, [name for name in names if not name.startswith("f_rest")])
        for number in range(n_bands):
            remaining = with_column(remaining, f"f_rest_{number}", "f4", rest[:, number])
        write_table(path, remaining)
    elif form == "far":
        shift = (draw.choice(SHIFTS[1:]), draw.choice(SHIFTS), 0.0)
        table = table.astype([(name, "<f8") for name in names])
        for axis, distance in zip("xyz", shift, strict=True):
            table[axis] += distance
        write_table(path, table)
        np.savetxt(root / OFFSET_FILE, np.round(shift))
        return Variant(f"PLY at {shift}", shift=shift)
    elif form == "quats":
        for number in range(4):
            table[f"rot_{number}"] *= 37.0
        table["rot_0"][0] = 1e-30
        write_table(path, table)
    elif form == "filter":
        write_table(path, with_column(table, "filter_3D", "f4", 0.0))
    elif form == "upper case":
        write_table(path, table.astype([(name.upper(), "<f4") for name in names]))
        ends = EITHER
    else:
        write_table(path, columns_of(table, [name for name in names if name != "scale_2"]))
        ends = REFUSED
    return Variant(f"PLY: {form}", changed=changed, ends=ends)


def mean_color(colors: np.ndarray, whole: bool) -> list[float]:
    shown = np.rint(colors * 255).clip(0, 255) / 255 if whole else colors
    return rgb_to_sh(shown).mean(axis=0).tolist()


def table_of(path: Path) -> np.ndarray:
    """Rows of a PLY, apart from the file, which may be written again."""
    return np.array(PlyData.read(str(path))["vertex"].data)


def columns_of(table: np.ndarray, names: list[str]) -> np.ndarray:
    return repack_fields(table[names])


def with_column(table: np.ndarray, name: str, kind: str, values: object) -> np.ndarray:
    kinds = [(other, table.dtype[other]) for other in table.dtype.names]
    wider = np.zeros(len(table), [*kinds, (name, kind)])
    for other, _ in kinds:
        wider[other] = table[other]
    wider[name] = values
    return wider


def write_table(path: Path, table: np.ndarray, text: bool = False, order: str = "<") -> None:
    PlyData([PlyElement.describe(table, "vertex")], text=text, byte_order=order).write(str(path))


def write_lists(path: Path, table: np.ndarray, column: str) -> None:
    """A PLY in which a column, which is added where it is missing, is a list in each row."""
    kinds = {name: table.dtype[name] for name in table.dtype.names} | {column: np.dtype(object)}
    rows = np.zeros(len(table), list(kinds.items()))
    for name in table.dtype.names:
        if name != column:
            rows[name] = table[name]
    for number in range(len(table)):
        rows[column][number] = np.arange(number % 4, dtype=np.float32)
    element = PlyElement.describe(
        rows, "vertex", len_types={column: "u1"}, val_types={column: "f4"}
    )
    PlyData([element], byte_order="<").write(str(path))
