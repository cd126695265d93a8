# SPDX-License-Identifier: Apache-2.0
"""Files of points and of meshes, valid and in other forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from plyfile import PlyData, PlyElement

from benchmarks.robustness.facts import EITHER, REFUSED, Facts, Variant
from benchmarks.robustness.reader_gaussians import (
    OFFSET_FILE,
    SCALES,
    SHIFTS,
    columns_of,
    write_lists,
    write_table,
)
from gaussian_splatting.formats.ply import read_point_ply, write_point_ply
from sugar_extractors.any_mesh import read_any_mesh
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_scene.triangle_mesh import TriangleMesh, write_mesh_ply
from sugar_utils.errors import Notify

N_POINTS = 40
_COLOR_NAMES = (
    ("red", "green", "blue"),
    ("Red", "Green", "Blue"),
    ("r", "g", "b"),
    ("diffuse_red", "diffuse_green", "diffuse_blue"),
    ("scalar_red", "scalar_green", "scalar_blue"),
)


def _points() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(N_POINTS, 3))


def write_points_file(root: Path) -> None:
    """Write coloured points."""
    colors = np.full((N_POINTS, 3), (200, 100, 50), np.uint8)
    write_point_ply(root / "points.ply", _points().astype(np.float32), colors)


def read_points_file(root: Path, notify: Notify) -> Facts:
    """Facts of points to start from."""
    offset = np.zeros(3)
    if (root / OFFSET_FILE).is_file():
        offset = np.loadtxt(root / OFFSET_FILE)
    points, colors = read_point_ply(root / "points.ply", notify, offset)
    facts: Facts = {"points": len(points)}
    if len(points):
        facts["middle place"] = (points.astype(np.float64).mean(axis=0) + offset).tolist()
        facts["color"] = colors.mean(axis=0).tolist()
    return facts


def points_variant(root: Path, draw: Random) -> Variant:
    """Write points with other types, names and places."""
    path = root / "points.ply"
    forms = ("ascii", "big", "names", "types", "grey", "scale", "far", "list", "empty", "nan", "x")
    form = draw.choice(forms)
    scale = draw.choice(SCALES) if form == "scale" else 1.0
    shift = (draw.choice(SHIFTS[1:]), draw.choice(SHIFTS), 0.0) if form == "far" else (0.0,) * 3
    places = _points() * scale + np.array(shift)
    colors = dict.fromkeys(("red", "green", "blue"), "u1")
    values = np.array([200.0, 100.0, 50.0])
    changed: Facts = {}
    if form == "names":
        colors = dict.fromkeys(draw.choice(_COLOR_NAMES), "u1")
    elif form == "types":
        kind, most = draw.choice((("f4", 1.0), ("f8", 1.0), ("u2", 65535)))
        colors = dict.fromkeys(colors, kind)
        values = values / 255 * most
    elif form == "grey":
        colors = {}
        changed["color"] = [128.0] * 3
    kinds = [*((axis, "f8") for axis in "xyz"), *colors.items()]
    table = np.zeros(N_POINTS, kinds)
    for number, axis in enumerate("xyz"):
        table[axis] = places[:, number]
    for name, value in zip(colors, values, strict=False):
        table[name] = value
    ends = ("accepted",)
    if form == "nan":
        table["y"][:2] = draw.choice((np.nan, np.inf))
        changed = {"points": N_POINTS - 2, "middle place": places[2:].mean(axis=0).tolist()}
    if form == "far":
        np.savetxt(root / OFFSET_FILE, np.round(shift))
    if form == "empty":
        table = table[:0]
        changed = {"points": 0, "middle place": None, "color": None}
        ends = EITHER
    if form == "list":
        write_lists(path, table, draw.choice(("x", "z", "red")))
        return Variant("points: list", ends=REFUSED)
    if form == "x":
        write_table(path, columns_of(table, ["y", "z"]))
        return Variant("points without x", ends=REFUSED)
    write_table(path, table, text=form == "ascii", order=">" if form == "big" else "<")
    return Variant(f"points: {form}", scale, shift, changed, ends)


_CUBE = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_FACES = np.array([[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1]])
_UVS = np.array([[0.1, 0.1], [0.9, 0.1], [0.5, 0.9]])
_MATERIALS = ("clay red", "grün")


def write_obj(root: Path) -> None:
    """Write an OBJ of two materials with a picture each."""
    _write_obj(root, {}, _MATERIALS)


def _write_obj(
    root: Path,
    changes: Mapping[str, str],
    materials: tuple[str, ...],
    with_normals: bool = False,
) -> None:
    """Write the OBJ; ``changes`` are made in the texts of OBJ and MTL."""
    lines = ["mtllib my mesh.mtl"]
    lines += [f"v {x:g} {y:g} {z:g}" for x, y, z in _CUBE]
    lines.append("vn 0 0 1")
    for number, face in enumerate(_FACES):
        lines += [f"vt {u:g} {v:g}" for u, v in _UVS]
        if number % 3 == 0:
            lines.append(f"usemtl {materials[min(number // 3, len(materials) - 1)]}")
        normal = "/1" if with_normals else ""
        corners = [f"{vertex + 1}/{3 * number + k + 1}{normal}" for k, vertex in enumerate(face)]
        lines.append(f"f {' '.join(corners)}")
    material_lines = []
    for number, name in enumerate(materials):
        material_lines += [f"newmtl {name}", "Kd 1 1 1", f"map_Kd picture {number}.png"]
        pixels = np.full((8 + 8 * number, 16, 3), 60 + 90 * number, np.uint8)
        Image.fromarray(pixels).save(root / f"picture {number}.png")
    for name, text in (("mesh.obj", lines), ("my mesh.mtl", material_lines)):
        content = "\n".join([*text, ""])
        for old, new in changes.items():
            content = content.replace(old, new)
        (root / name).write_text(content, encoding="utf-8", newline="")


def read_obj(root: Path, notify: Notify) -> Facts:
    """Facts of a textured mesh: the mean colour of its faces' corners among them."""
    mesh = read_textured_mesh(root / "mesh.obj")
    height, width, _ = mesh.texture.shape
    middle = mesh.uvs.mean(dim=1)
    column = (middle[:, 0] * width).long().clamp(0, width - 1)
    row = ((1 - middle[:, 1]) * height).long().clamp(0, height - 1)
    colors = mesh.texture[row, column].double()
    return {
        "vertices": len(mesh.vertices),
        "faces": mesh.n_faces,
        "middle place": mesh.vertices.double().mean(dim=0).tolist(),
        "spread length": mesh.vertices.double().std(dim=0).tolist(),
        "colors": colors.flatten().tolist(),
    }


def obj_variant(root: Path, draw: Random) -> Variant:
    """Write a textured mesh with other names, lines and materials."""
    forms: dict[str, dict[str, str]] = {
        "crlf": {"\n": "\r\n"},
        "comments": {"usemtl": "# about\nusemtl", "newmtl": "# about\nnewmtl"},
        "groups": {"usemtl": "g part\ns off\no thing\nusemtl"},
        "tabs": {"map_Kd ": "\tmap_Kd "},
        "backslashes": {"map_Kd picture": "map_Kd .\\picture"},
        "absolute": {"map_Kd picture": "map_Kd C:\\Users\\Anna\\scan\\picture"},
        "case": {"map_Kd picture": "map_Kd PICTURE"},
        "material file": {"mtllib my mesh": "mtllib D:\\scans\\My Mesh"},
        "suffix": {".png": ".jpg"},
        "spaces": {"\nv ": "\nv  ", "f ": "f  "},
        "end": {"map_Kd picture 1.png\n": "map_Kd picture 1.png"},
    }
    form = draw.choice((*forms, "normals", "one material", "missing", "quads", "empty", "encoding"))
    if form == "one material":
        _write_obj(root, {}, _MATERIALS[:1])
        return Variant("OBJ: one material", changed={"colors": [60.0] * 18})
    _write_obj(root, forms.get(form, {}), _MATERIALS, with_normals=form == "normals")
    ends = ("accepted",)
    if form == "missing":
        (root / draw.choice(("picture 1.png", "my mesh.mtl"))).unlink()
        ends = REFUSED
    elif form == "quads":
        path = root / "mesh.obj"
        path.write_text(path.read_text(encoding="utf-8") + "f 1/1 2/2 4/3 3/1\n", encoding="utf-8")
        ends = REFUSED
    elif form == "empty":
        (root / draw.choice(("mesh.obj", "my mesh.mtl", "picture 0.png"))).write_bytes(b"")
        ends = REFUSED
    elif form == "encoding":
        picture = root / "picture 1.png"
        picture.rename(root / "Größe.png")
        for path in (root / "mesh.obj", root / "my mesh.mtl"):
            text = path.read_text(encoding="utf-8").replace("picture 1", "Größe")
            path.write_bytes(text.encode("cp1252"))
    return Variant(f"OBJ: {form}", ends=ends)


def write_mesh(root: Path) -> None:
    """Write a mesh as PLY."""
    colors = np.full((len(_CUBE), 3), 90, np.uint8)
    write_mesh_ply(root / "mesh.ply", TriangleMesh(_CUBE, _FACES, colors))


def read_mesh(root: Path, notify: Notify) -> Facts:
    """Facts of a mesh without a texture."""
    mesh = read_any_mesh(root / "mesh.ply")
    facts: Facts = {"vertices": mesh.n_vertices, "faces": mesh.n_faces}
    if mesh.n_vertices:
        vertices = torch.from_numpy(mesh.vertices).float().double()
        facts["middle place"] = vertices.mean(dim=0).tolist()
        facts["color"] = mesh.colors.astype(float).mean(axis=0).tolist()
    return facts


def mesh_variant(root: Path, draw: Random) -> Variant:
    """Write a mesh with other types of vertices and faces."""
    form = draw.choice(("ascii", "big", "double", "quads", "vertex_index", "list", "points"))
    vertices = np.zeros(len(_CUBE), [(axis, "f8" if form == "double" else "f4") for axis in "xyz"])
    for number, axis in enumerate("xyz"):
        vertices[axis] = _CUBE[:, number]
    name = "vertex_index" if form == "vertex_index" else "vertex_indices"
    corners = [*_FACES.tolist()]
    changed: Facts = {"color": None}
    if form == "quads":
        corners = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1]]
    faces = np.zeros(len(corners), [(name, object)])
    for number, face in enumerate(corners):
        faces[name][number] = np.array(face, np.int32)
    path = root / "mesh.ply"
    elements = [PlyElement.describe(vertices, "vertex")]
    if form == "list":
        write_lists(path, vertices, draw.choice("xyz"))
        return Variant("mesh: list", ends=REFUSED)
    if form != "points":
        elements.append(PlyElement.describe(faces, "face"))
    PlyData(elements, text=form == "ascii", byte_order=">" if form == "big" else "<").write(
        str(path)
    )
    changed["color"] = [128.0] * 3
    return Variant(
        f"mesh: {form}", changed=changed, ends=REFUSED if form == "points" else ("accepted",)
    )
