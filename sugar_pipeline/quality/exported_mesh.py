# SPDX-License-Identifier: Apache-2.0
"""Meshes as another program reads them: an exported file, through trimesh.

Nothing here uses the code that writes these files, so that a fault of a writer shows. Only the list
of the files that belong to an OBJ comes from its lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gaussian_splatting.data.color_spaces import srgb_of_light
from sugar_scene.triangle_mesh import TriangleMesh, edge_keys, fits_float32, topology
from sugar_utils.errors import UserError, reason_of
from sugar_utils.files import require_regular_file

SUFFIXES = (".glb", ".obj", ".ply")
_WITHOUT_TEXTURE = -1
_ADVICE = "export it again"
_PICTURE_WORDS = ("map_Kd", "map_Bump", "map_Kn", "norm")  # of an MTL, before the name of a file


@dataclass(frozen=True)
class ExportedMesh:
    """Triangles of a file with their textures or vertex colours, in the file's coordinates."""

    vertices: np.ndarray  # one per position and texture coordinate, (V, 3) float64
    faces: np.ndarray  # rows of the vertices, (F, 3) int64
    uvs: np.ndarray  # texture coordinates of the vertices, v upwards, (V, 2) float64
    textures: tuple[np.ndarray, ...]  # row 0 is at v = 1, (H, W, 3) uint8 each
    face_textures: np.ndarray  # index of the texture; -1: vertex colours, (F,) int64
    colors: np.ndarray  # of the vertices, (V, 3) uint8; black where faces have a texture
    files: tuple[Path, ...]  # the file, and those that it refers to

    @property
    def n_faces(self) -> int:
        """Number of triangles."""
        return len(self.faces)

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Shape:
    """Counts of a mesh after joining vertices at equal positions."""

    positions: int  # different places of the vertices
    open_edges: int  # edges of a single triangle
    open_edge_share: float  # these, of all edges
    components: int

    @classmethod
    def of(cls, mesh: ExportedMesh) -> Shape:
        """Count after joining vertices that texture coordinates split."""
        places, rows = np.unique(mesh.vertices, axis=0, return_inverse=True)
        faces = rows.reshape(-1)[mesh.faces]
        colors = np.zeros((len(places), 3), np.uint8)
        figures = topology(TriangleMesh(places, faces, colors))
        _, counts = np.unique(edge_keys(faces), return_counts=True)
        return cls(
            positions=len(np.unique(faces)),
            open_edges=int((counts == 1).sum()),
            open_edge_share=figures.open_edge_share,
            components=figures.components,
        )


def read_exported(path: Path) -> ExportedMesh:
    """Read a GLB, an OBJ with its material and pictures, or a PLY with vertex colours.

    Nodes of a GLB move what hangs on them.

    Raises:
        UserError: The file is missing, damaged, of another kind, or has neither a texture nor
            vertex colours.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file; check --exported")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: cannot be measured; pass one of {', '.join(SUFFIXES)}")
    require_regular_file(path)
    files = _files_of(path)
    try:
        has_pictures = _has_pictures(path) and _missing_file(path, files) is None
        parts = list(_parts(path, has_pictures))
    # Of a damaged file the package raises whatever comes up.
    except Exception as error:
        reason = reason_of(error)
        raise UserError(f"{path}: damaged, or not a mesh ({reason}); {_ADVICE}") from error
    if not sum(len(part.faces) for part in parts):
        raise UserError(f"{path}: has no triangles; {_ADVICE}")
    for part in parts:
        if part.texture is None and part.colors is None:
            raise UserError(_without_colors(path, files))
    mesh = _joined(parts, files)
    if not (fits_float32(mesh.vertices) and fits_float32(mesh.uvs)):
        raise UserError(f"{path}: has vertices with NaN or infinity; {_ADVICE}")
    return mesh


@dataclass(frozen=True)
class _Part:
    """Triangles with one material."""

    vertices: np.ndarray  # (V, 3) float64
    faces: np.ndarray  # (F, 3) int64
    uvs: np.ndarray | None  # (V, 2)
    texture: np.ndarray | None  # (H, W, 3) uint8
    colors: np.ndarray | None  # (V, 3) uint8


def _parts(path: Path, has_pictures: bool) -> Iterator[_Part]:
    """Yield the triangles of each node of a file, moved as the node says.

    Args:
        path: The file.
        has_pictures: Whether the file has pictures; without them the package makes one up.
    """
    # It takes longer to load than the rest of a program that does not use it.
    import trimesh

    # Keeping the order of vertices would drop texture coordinates that differ at one vertex.
    scene = trimesh.load_scene(path, process=False, maintain_order=False)
    for node in scene.graph.nodes_geometry:
        matrix, name = scene.graph[node]
        geometry = scene.geometry[name]
        if not isinstance(geometry, trimesh.Trimesh) or _is_unseen(geometry.visual):
            continue
        texture = _texture_of(geometry.visual) if has_pictures else None
        uvs = getattr(geometry.visual, "uv", None)
        colors = _colors_of(geometry.visual)
        if has_pictures and texture is None and colors is None:
            # The other materials have pictures, this one a colour.
            color = _plain_color(geometry.visual)
            colors = None if color is None else np.tile(color, (len(geometry.vertices), 1))
        yield _Part(
            vertices=_moved(np.asarray(geometry.vertices, np.float64), np.asarray(matrix)),
            faces=np.asarray(geometry.faces, np.int64),
            uvs=None if uvs is None else np.asarray(uvs, np.float64),
            texture=None if uvs is None else texture,
            colors=colors,
        )


def _moved(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return points after an affine map; equal points stay equal. (V, 3) and (4, 4) -> (V, 3)"""
    columns = []
    # A matrix product may round equal rows in different ways.
    for row in matrix[:3].astype(np.float64):
        along = points[:, 0] * row[0] + points[:, 1] * row[1] + points[:, 2] * row[2]
        columns.append(along + row[3])
    return np.stack(columns, axis=1)


def _is_unseen(visual: Any) -> bool:
    """Return whether a material masks all that it covers, as shapes to collide with have it."""
    material = getattr(visual, "material", None)
    factor: Any = getattr(material, "baseColorFactor", None)
    return getattr(material, "alphaMode", None) == "MASK" and factor is not None and factor[3] == 0


def _texture_of(visual: Any) -> np.ndarray | None:
    """Return the picture of a material, (H, W, 3) uint8; None without one."""
    material = getattr(visual, "material", None)
    picture: Any = getattr(material, "baseColorTexture", None)
    if picture is None:
        picture = getattr(material, "image", None)
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"))
    return None


def _plain_color(visual: Any) -> np.ndarray | None:
    """Return the colour of a material without a picture, (3,) uint8; None without a material."""
    material = getattr(visual, "material", None)
    diffuse = getattr(material, "diffuse", None)
    if diffuse is not None:
        return np.asarray(diffuse, np.uint8)[:3]
    if not hasattr(material, "baseColorFactor"):
        return None
    # Of glTF: linear, and white where a material does not say.
    factor: Any = getattr(material, "baseColorFactor", None)
    light = np.ones(3) if factor is None else np.asarray(factor, np.float64)[:3] / 255
    return srgb_of_light(light)


def _colors_of(visual: Any) -> np.ndarray | None:
    """Return colours of vertices, (V, 3) uint8; None where the file has none."""
    colors = None
    if getattr(visual, "kind", None) == "vertex":
        colors = visual.vertex_colors
    elif getattr(visual, "kind", None) == "texture":
        colors = visual.vertex_attributes.get("color")
    return None if colors is None else np.asarray(colors)[:, :3].astype(np.uint8)


def _joined(parts: list[_Part], files: tuple[Path, ...]) -> ExportedMesh:
    """Return the parts as one mesh."""
    faces = []
    uvs = []
    colors = []
    textures: list[np.ndarray] = []
    face_textures = []
    first = 0
    for part in parts:
        n_vertices = len(part.vertices)
        index = _WITHOUT_TEXTURE
        if part.texture is not None:
            index = len(textures)
            textures.append(part.texture)
        faces.append(part.faces + first)
        uvs.append(np.zeros((n_vertices, 2)) if part.uvs is None else part.uvs)
        no_colors = np.zeros((n_vertices, 3), np.uint8)
        colors.append(no_colors if part.colors is None else part.colors)
        face_textures.append(np.full(len(part.faces), index))
        first += n_vertices
    return ExportedMesh(
        vertices=np.concatenate([part.vertices for part in parts]),
        faces=np.concatenate(faces),
        uvs=np.concatenate(uvs),
        textures=tuple(textures),
        face_textures=np.concatenate(face_textures),
        colors=np.concatenate(colors),
        files=files,
    )


def _has_pictures(path: Path) -> bool:
    """Return whether a GLB has images, or the material of an OBJ names a picture that is there."""
    suffix = path.suffix.lower()
    if suffix == ".glb":
        return b'"images"' in path.read_bytes()
    materials = _named_files(path, ("mtllib",)) if suffix == ".obj" else []
    pictures = [file for material in materials for file in _named_files(material, ("map_Kd",))]
    return any(file.is_file() for file in pictures)


def _files_of(path: Path) -> tuple[Path, ...]:
    """Return a file and, of an OBJ, its material files and their pictures, if they are there."""
    files = [path]
    if path.suffix.lower() == ".obj":
        for material in _named_files(path, ("mtllib",)):
            files += [material, *_named_files(material, _PICTURE_WORDS)]
    return tuple(dict.fromkeys(file for file in files if file.is_file()))


def _named_files(path: Path, words: tuple[str, ...]) -> list[Path]:
    """Return the files that lines of a text file name after one of some words."""
    if not path.is_file():
        return []
    files = []
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            word, _, name = line.strip().partition(" ")
            if word in words and name.strip():
                files.append(path.parent / name.strip())
    return files


def _without_colors(path: Path, files: tuple[Path, ...]) -> str:
    """Return the error text for a mesh without colours."""
    missing = _missing_file(path, files)
    if missing is not None:
        return f"{path}: has no texture, because {missing} is not beside it; copy it, too"
    return f"{path}: has neither a texture nor vertex colours; pass a textured mesh"


def _missing_file(path: Path, files: tuple[Path, ...]) -> str | None:
    """Return the name of a file that an OBJ needs and that is not there; None without one."""
    if path.suffix.lower() != ".obj":
        return None
    for material in _named_files(path, ("mtllib",)):
        for file in (material, *_named_files(material, _PICTURE_WORDS)):
            if file not in files:
                return file.name
    return None
