# SPDX-License-Identifier: Apache-2.0
"""Where a file stands: the matrix from the scene of a run to the coordinates of the file.

A run works in the world of its scene. What it exports may stand upright, in metres, on a map or in
the coordinates of the original capture. Each such file has a record of one schema, and
:meth:`Placement.of` finds it:

- in the file: ``extras`` of a GLB, the first lines of an OBJ, the comments of a PLY;
- beside it: ``NAME.glb.json`` of an export, ``NAME_placed.json`` of the texture stage;
- in the folder of results, and in the folder of blocks: ``transform.json``;
- in the ``tileset.json`` of 3D Tiles.

A file without a record has the coordinates of the scene, in the axes that its format asks for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from gaussian_splatting.core.moved import GLB_AXES, scale_of_matrix
from gaussian_splatting.data.world_offset import FAR_AWAY
from gaussian_splatting.formats.gltf_container import read_root_extras
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import read_json, relative_path
from sugar_utils.schemas import Coordinate, FileName, JsonObject, conform

TRANSFORM = "transform.json"  # record in the folder of results
MESH = "mesh"  # stem of the mesh in the folder of results
SPLATS = "splats.ply"  # Gaussians in the folder of results
TILES = "tileset.json"  # entry of 3D Tiles, which has the record of its tiles
PLACED = "_placed"  # end of the stem of the copies that the texture stage writes
UP = "+y"  # word for files that stand upright
Z_UP = "+z"  # word for files with the axes of a map
METRE = "metre"
KEY = "placement"  # of the record in a file
Y_UP_SUFFIXES = (".glb", ".gltf", ".spz", ".usd", ".usda", ".usdc", ".usdz")

_GAUSSIANS = "_gaussians"  # end of the stem of the Gaussians of such a copy
_MEANING = "file = matrix x (x, y, z, 1) of the scene; rows of 4"
_EARLIER_MEANING = "exported = matrix x (x, y, z, 1) of the capture; rows of 4"
_SMALLEST_VOLUME = 1e-30  # of the unit cube, after a matrix that can be undone
_HEAD = 1 << 20  # bytes of an OBJ or a PLY in which a record is looked for

_Triple = tuple[Coordinate, Coordinate, Coordinate]
_Row = tuple[Coordinate, Coordinate, Coordinate, Coordinate]
_Matrix = tuple[_Row, _Row, _Row, _Row]


class PlacementRecord(msgspec.Struct):
    """The record of a placement in JSON; a file without ``matrix`` is about something else.

    Earlier versions wrote fewer of these keys. Paths are relative to the folder of the record.
    """

    matrix: _Matrix | None = None
    # Of the GLB beside the files that ``matrix`` is about, where it is another one.
    glb_matrix: _Matrix | None = None
    up: str | None = None
    unit: str | None = None
    offset: _Triple = (0.0, 0.0, 0.0)
    world_offset: _Triple | None = None
    map: JsonObject | None = None
    model: FileName | None = None
    scene: FileName | None = None
    checkpoint: FileName | None = None


@dataclass(frozen=True)
class Origin:
    """Inputs of a result; None where they are unknown."""

    model: Path | None = None  # the file of Gaussians or the mesh that was exported
    scene: Path | None = None  # folder of the capture
    checkpoint: Path | None = None  # vanilla checkpoint whose cameras say where the world lies
    # What is subtracted from the coordinates of the original capture to get the scene. (3,)
    world_offset: np.ndarray | None = None


@dataclass(frozen=True)
class Placement:
    """Where the coordinates of a file lie.

    Coordinates of a map or of an original capture have more digits than float32. Readers subtract
    ``offset`` from them in float64, and what they return is called near: it lies near the origin.
    """

    matrix: np.ndarray  # from the scene to near coordinates, a similarity, (4, 4) float64
    offset: np.ndarray = field(default_factory=lambda: np.zeros(3))  # file = near + offset, (3,)
    up: str | None = None  # axis that points up in the file; None where that is unknown
    unit: str | None = None  # of lengths; None for the unit of the capture
    map: JsonObject | None = None  # system, code, residuals, as the map says them
    origin: Origin = Origin()
    source: str = "not moved"  # where this is known from

    @classmethod
    def of(cls, path: Path, record: Path | None = None) -> Placement:
        """Return where a file, or the folder of results, stands.

        Args:
            path: The file.
            record: A record at another place than those that are searched.

        Raises:
            UserError: A record is damaged, or the given one has no matrix.
        """
        if record is not None:
            placement = _read(record, path, read_json(record))
            if placement is None:
                raise UserError(f"{record}: has no matrix; name the record of {path.name}")
            return placement
        for place, content in _contents(path):
            placement = _read(place, path, content)
            if placement is not None:
                return placement
        return cls.unmoved(path)

    @classmethod
    def as_read(cls, path: Path) -> Placement:
        """Return where a file stands as it is read: without the turn of a format with y up."""
        placement = cls.of(path)
        turn = placement.to_own_axes(path)
        return placement if turn is None else placement.moved(turn)

    @classmethod
    def unmoved(cls, path: Path) -> Placement:
        """Return where a file stands that has the coordinates of the scene."""
        is_turned = path.suffix.lower() in Y_UP_SUFFIXES
        return cls(GLB_AXES if is_turned else np.eye(4))

    @property
    def is_recorded(self) -> bool:
        """Whether a record says where the file stands."""
        return self.source != Placement.source

    @property
    def is_metric(self) -> bool:
        """Whether lengths are in metres."""
        return self.unit == METRE

    @property
    def scale(self) -> float:
        """Units of the file per unit of the scene."""
        return abs(scale_of_matrix(self.matrix))

    def to_scene(self, world_offset: np.ndarray | None = None) -> np.ndarray:
        """Return the matrix from near coordinates to a scene. (4, 4)

        Args:
            world_offset: Of the scene; it may be another one than when the file was made, as it
                depends on the photographs. None: the one that the file was made with. (3,)
        """
        matrix = np.linalg.inv(self.matrix)
        recorded = self.origin.world_offset
        if world_offset is not None and recorded is not None:
            matrix[:3, 3] += recorded - world_offset
        return matrix

    def moved(self, matrix: np.ndarray) -> Placement:
        """Return the placement of what is moved on from near coordinates. (4, 4)"""
        return replace(self, matrix=matrix @ self.matrix, offset=np.zeros(3))

    def to_own_axes(self, path: Path) -> np.ndarray | None:
        """Return the matrix that takes the turn of a format with y up back; None without one.

        Where nothing says which axis points up, the format alone asks for the turn. (4, 4)
        """
        is_turned = path.suffix.lower() in Y_UP_SUFFIXES and self.up is None
        return GLB_AXES if is_turned else None

    def record(self, folder: Path) -> dict[str, object]:
        """Return the record for a JSON file in a folder."""
        full = self.matrix.copy()
        full[:3, 3] += self.offset
        values: dict[str, object] = {
            "matrix": full.tolist(),
            "meaning": _MEANING,
            "up": self.up,
            "unit": self.unit,
        }
        if self.offset.any():
            values["offset"] = self.offset.tolist()
        if self.map is not None:
            values["map"] = self.map
        origin = self.origin
        if origin.world_offset is not None:
            values["world_offset"] = origin.world_offset.tolist()
        for name in ("model", "scene", "checkpoint"):
            path = getattr(origin, name)
            if path is not None:
                values[name] = relative_path(path, folder)
        return values


def glb_matrix(placement: Placement) -> np.ndarray:
    """Return the matrix to a GLB beside files, which turns a world that is not upright. (4, 4)"""
    return placement.matrix if placement.up == UP else GLB_AXES @ placement.matrix


def expected_record(path: Path) -> str | None:
    """Return the name of the record that a file must have by its name; None for any other file."""
    if path.is_dir() or path.stem in (MESH, Path(SPLATS).stem):
        return TRANSFORM
    copy = path.stem.removesuffix(_GAUSSIANS)
    return f"{copy}.json" if copy.endswith(PLACED) else None


def earlier_record(path: Path) -> JsonObject:
    """Return the record that an earlier export left as a file of its own; empty without one."""
    if path.is_file():
        with contextlib.suppress(UserError):
            record = read_json(path)
            if isinstance(record, dict) and record.get("meaning") in (_MEANING, _EARLIER_MEANING):
                return record
    return {}


def placed_path(obj_path: Path) -> Path:
    """Return the OBJ of the copy of a textured mesh that the texture stage writes."""
    return obj_path.with_name(f"{obj_path.stem}{PLACED}.obj")


def placed_gaussians(obj_path: Path) -> Path:
    """Return the PLY of the Gaussians beside the copy of a textured mesh, :func:`placed_path`."""
    return obj_path.with_name(f"{obj_path.stem}{PLACED}{_GAUSSIANS}.ply")


def note_unknown(path: Path, placement: Placement, notify: Notify) -> None:
    """Warn that a file has no placement, so it is read in the frame of the scene."""
    expected = expected_record(path)
    if not placement.is_recorded and expected is not None:
        notify(
            f"note: no {expected} beside {path.name} says where it stands; it is taken to be in "
            "the world of the cameras"
        )


def _contents(path: Path) -> Iterator[tuple[Path, object]]:
    """Yield the places that may hold the record of a file, and their values, the surest first."""
    for place in _files_beside(path):
        if place.is_file() and place != path:
            content = read_json(place)
            if place.name == TILES and isinstance(content, dict):
                content = content.get("extras")
            yield place, content
    if path.is_file():
        yield path, _own_record(path)


def _files_beside(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield path / TRANSFORM
        return
    yield path.with_name(f"{path.name}.json")
    yield path.with_suffix(".json")
    expected = expected_record(path)
    if expected is not None:
        yield path.with_name(expected)
    yield path.with_name(TILES)


def _own_record(path: Path) -> object:
    """Return the record within a file; None without one."""
    suffix = path.suffix.lower()
    if suffix == ".glb":
        return read_root_extras(path).get(KEY)
    if path.name == TILES:
        content = read_json(path)
        return content.get("extras") if isinstance(content, dict) else None
    start = {".obj": b"# ", ".ply": b"comment "}.get(suffix)
    if start is None:
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD)
    mark = start + KEY.encode() + b" "
    for line in head.split(b"\n"):
        if line.startswith(mark):
            return _json_of(path, line[len(mark) :])
        if line.startswith((b"v ", b"end_header")):
            return None
    return None


def _json_of(path: Path, text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its line of {KEY} is damaged; export it again") from error


def _read(place: Path, path: Path, content: object) -> Placement | None:
    """Return the placement of a record; None if it is about something else.

    Args:
        place: The file that the record is in.
        path: The file that it is about.
        content: Values of its JSON.
    """
    if not isinstance(content, dict) or content.get("matrix") is None:
        return None
    record = conform(content, PlacementRecord, place)
    rows = record.matrix
    if path.suffix.lower() == ".glb" and record.glb_matrix is not None:
        rows = record.glb_matrix
    matrix = np.array(rows, dtype=np.float64)
    volume = abs(np.linalg.det(matrix))
    if not _SMALLEST_VOLUME < volume < 1 / _SMALLEST_VOLUME:
        raise UserError(f"{place}: its matrix cannot be undone; export the mesh again")
    offset = np.array(record.offset)
    if not offset.any():
        # Earlier versions wrote none.
        offset = _far_part(matrix)
    matrix[:3, 3] -= offset
    folder = place.parent
    world_offset = None if record.world_offset is None else np.array(record.world_offset)
    return Placement(
        matrix,
        offset,
        record.up,
        record.unit,
        record.map,
        Origin(
            _path(record.model, folder),
            _path(record.scene, folder),
            _path(record.checkpoint, folder),
            world_offset,
        ),
        f"moved as {place.name} says",
    )


def _path(name: str | None, folder: Path) -> Path | None:
    return None if name is None else folder / name


def _far_part(matrix: np.ndarray) -> np.ndarray:
    """Return the translation of a matrix where float32 has too few digits for it, else 0. (3,)"""
    translation = matrix[:3, 3].copy()
    scale = abs(scale_of_matrix(matrix))
    return translation if np.abs(translation).max() > FAR_AWAY * scale else np.zeros(3)


def record_line(values: object) -> str:
    """Return a record as the text of a comment in an OBJ or a PLY."""
    return f"{KEY} {json.dumps(values)}"
