# SPDX-License-Identifier: Apache-2.0
"""Materials of OBJ files; the pictures of several of them are put together into one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from gaussian_splatting.data.names import ImageFolder
from sugar_utils.errors import UserError
from sugar_utils.files import require_regular_file

LARGEST_PICTURE = 16_384  # pixels of a side, which viewers take
_PADDING = 2  # pixels around each picture that repeat its border, which bilinear sampling reaches
_OUTSIDE = 1e-3  # of a picture by which texture coordinates may lie beyond it
_WHITE = (255, 255, 255)
# An option of a picture in an MTL file, and its values: numbers, or a word of this list.
_OPTION = re.compile(r"-([A-Za-z]+)((?:\s+(?:on|off|[rgbmlz]|[-+]?[\d.][\d.eE+-]*)(?=\s))*)\s+")
_OPTIONS = re.compile(rf"(?:{_OPTION.pattern})+")
_NEUTRAL = {"o": 0.0, "s": 1.0, "t": 0.0}  # values of options that leave a picture where it is
_NEXT_FILE = re.compile(r"(?<=\.mtl)\s+", re.IGNORECASE)  # between names of MTL files


@dataclass(frozen=True)
class Material:
    """A material of an MTL file."""

    picture: str | None = None  # name of the file with the colours
    normals: str | None = None  # name of the file with tangent-space normals
    color: tuple[int, int, int] = _WHITE  # where there is no picture


def name_of(raw: bytes) -> str:
    """Return the name of a material or of a file; bytes that are no UTF-8 are escaped."""
    return raw.decode("utf-8", "surrogateescape").strip()


def materials_of(lines: Sequence[bytes]) -> dict[str, Material]:
    """Read the materials of the lines of an MTL file, by their names in order."""
    materials: dict[str, Material] = {}
    name = ""
    for line in lines:
        key, _, value = line.strip().replace(b"\t", b" ").partition(b" ")
        key = key.lower()
        text = name_of(value)
        if key == b"newmtl":
            name = text
            materials[name] = Material()
        current = materials.get(name, Material())
        if key == b"map_kd":
            materials[name] = replace(current, picture=_name_after_options(text))
        elif key in (b"norm", b"map_kn"):
            materials[name] = replace(current, normals=_name_after_options(text))
        elif key == b"kd":
            red, green, blue = (_byte(word) for word in text.split()[:3])
            materials[name] = replace(current, color=(red, green, blue))
    return materials


def _name_after_options(text: str) -> str:
    """Return the name of a picture without the options before it, such as ``-clamp on``.

    Raises:
        ValueError: An option moves or scales the picture.
    """
    match = _OPTIONS.match(text)
    if match is None:
        return text
    for option, values in _OPTION.findall(match[0]):
        neutral = _NEUTRAL.get(option)
        if neutral is not None and any(float(value) != neutral for value in values.split()):
            raise ValueError(f"a material moves or repeats its picture by -{option}{values}")
    return text[match.end() :]


def _byte(word: str) -> int:
    """Return a share in [0, 1] as a byte; other numbers are clamped."""
    share = min(max(float(word), 0), 1)
    return round(255 * share)


def materials_of_faces(lines: Sequence[bytes]) -> tuple[list[str], np.ndarray]:
    """Read which material each face of the lines of an OBJ file has.

    Returns:
        Names of the materials that are used, and the index of that of each face, (F,).
    """
    names: dict[str, int] = {}
    indices: list[int] = []
    current = ""
    for line in lines:
        if line.startswith(b"usemtl "):
            current = name_of(line[len(b"usemtl ") :])
        elif line.startswith(b"f "):
            indices.append(names.setdefault(current, len(names)))
    return list(names), np.array(indices, dtype=np.int64)


def material_paths(folder: Path, names: str) -> list[Path]:
    """Return the paths of the MTL files that a line of an OBJ names, which are there.

    Names are matched as images' are.
    """
    files = ImageFolder(folder, recursive=False, suffixes=(".mtl",))
    single_names = [names] if files.find(names) else _NEXT_FILE.split(names)
    return [_path_in(files, name) for name in single_names]


def picture_path(folder: Path, name: str) -> Path:
    """Return the path of a picture that a material names; names are matched as images' are."""
    return _path_in(ImageFolder(folder, recursive=False), name)


def _path_in(folder: ImageFolder, name: str) -> Path:
    path = folder.find(name) or folder.root / name
    return require_regular_file(path, missing_ok=True)


def read_picture(folder: Path, name: str) -> np.ndarray:
    """Read a picture that a material names. (H, W, 3) uint8"""
    with Image.open(picture_path(folder, name)) as image:
        return np.array(image.convert("RGB"))


def read_pictures(
    folder: Path, materials: Sequence[Material]
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Read the colours of some materials, and their normals where all of them have some.

    A material without a picture has one of a few pixels in its colour.
    """
    colors = []
    for material in materials:
        if material.picture is None:
            colors.append(np.full((2, 2, 3), material.color, np.uint8))
        else:
            colors.append(read_picture(folder, material.picture))
    names = [material.normals for material in materials if material.normals is not None]
    if len(names) < len(materials):
        return colors, None
    return colors, [read_picture(folder, name) for name in names]


@dataclass(frozen=True)
class Layout:
    """Places of pictures in a larger one."""

    width: int
    height: int
    sizes: list[tuple[int, int]]  # width and height of each picture as it is put there
    corners: list[tuple[int, int]]  # column and row of the first pixel of each

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]]) -> Layout:
        """Put pictures of some sizes into columns, and halve them until the whole fits.

        Args:
            sizes: Widths and heights in pixels.
        """
        layout = _in_columns(sizes)
        divisor = 1
        while max(layout.width, layout.height) > LARGEST_PICTURE > divisor:
            divisor *= 2
            smaller = []
            for width, height in sizes:
                smaller.append((max(1, width // divisor), max(1, height // divisor)))
            layout = _in_columns(smaller)
        return layout

    @classmethod
    def whole(cls, picture: np.ndarray) -> Layout:
        """Return the layout of one picture, (H, W, 3), that is the whole."""
        height, width, _ = picture.shape
        return cls(width, height, [(width, height)], [(0, 0)])

    def filled(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return the large picture, with the given ones in it. (height, width, 3) uint8"""
        canvas = np.zeros((self.height, self.width, 3), np.uint8)
        for picture, size, corner in zip(pictures, self.sizes, self.corners, strict=True):
            scaled = picture
            if (picture.shape[1], picture.shape[0]) != size:
                image = Image.fromarray(picture).resize(size, Image.Resampling.BOX)
                scaled = np.asarray(image)
            margin = (_PADDING, _PADDING)
            padded = np.pad(scaled, (margin, margin, (0, 0)), mode="edge")
            height, width, _ = padded.shape
            column = corner[0] - _PADDING
            row = corner[1] - _PADDING
            canvas[row : row + height, column : column + width] = padded
        return canvas

    def moved(self, uvs: np.ndarray, indices: np.ndarray, path: Path) -> np.ndarray:
        """Return texture coordinates in the large picture, v upwards. (F, 3, 2)

        Args:
            uvs: Of the corners of faces, each in the picture of its face, (F, 3, 2).
            indices: Of the picture of each face, (F,).
            path: Of the mesh, for messages.

        Raises:
            UserError: Where a face repeats its picture.
        """
        # Whole steps mean the same place.
        local = uvs - np.floor(uvs.min(axis=1, keepdims=True) + _OUTSIDE)
        if (local > 1 + _OUTSIDE).any():
            raise UserError(
                f"{path}: has faces that repeat their pictures; bake them into one texture first"
            )
        local = local.clip(0, 1)
        sizes = np.array(self.sizes, np.float64)[indices][:, None]
        corners = np.array(self.corners, np.float64)[indices][:, None]
        columns = corners[..., 0] + local[..., 0] * sizes[..., 0]
        rows = corners[..., 1] + (1 - local[..., 1]) * sizes[..., 1]
        return np.stack([columns / self.width, 1 - rows / self.height], axis=2)


def _in_columns(sizes: Sequence[tuple[int, int]]) -> Layout:
    """Put pictures below each other, and into a new column where one is full."""
    corners: list[tuple[int, int]] = []
    first_column = 0  # column at which the current column of pictures begins
    right = 0
    top = 0
    height = 0
    for picture_width, picture_height in sizes:
        needed = picture_height + 2 * _PADDING
        if top and top + needed > LARGEST_PICTURE:
            first_column = right
            top = 0
        corners.append((first_column + _PADDING, top + _PADDING))
        top += needed
        height = max(height, top)
        right = max(right, first_column + picture_width + 2 * _PADDING)
    return Layout(right, height, list(sizes), corners)
