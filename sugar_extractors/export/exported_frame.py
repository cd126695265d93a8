# SPDX-License-Identifier: Apache-2.0
"""Where an exported file stands: the matrix from the scene to it, from what the export recorded.

Records are JSON files beside the mesh: ``NAME.glb.json`` of ``export.py``, ``NAME_placed.json`` of
the texture stage, ``transform.json`` of the folder of results. A file without one stands where the
capture stands: OBJ and PLY in its axes, GLB with y up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gaussian_splatting.core.moved import GLB_AXES
from sugar_utils.errors import Notify, UserError
from sugar_utils.schemas import Coordinate, read_checked

UNMOVED = "none"
UP = "+y"  # word of records of files that stand upright
CAPTURE_AXES = (".obj", ".ply")  # files that have the axes of a capture where they are not moved
PLACED = "_placed"  # end of the name of a copy of the texture stage
_TRANSFORM = "transform.json"  # in the folder of results
_RESULT_NAMES = ("mesh", "splats")  # of the files in the folder of results, without suffix
_GAUSSIANS = "_gaussians"  # end of the name of the Gaussians of such a copy
_GLB = ".glb"
_SMALLEST_VOLUME = 1e-30  # of the unit cube, after a matrix that can be undone

_Row = tuple[Coordinate, Coordinate, Coordinate, Coordinate]
_Matrix = tuple[_Row, _Row, _Row, _Row]


class _Record(msgspec.Struct):
    """Matrices in a JSON file beside a mesh; the records of stages have none."""

    matrix: _Matrix | None = None
    glb_matrix: _Matrix | None = None  # of the GLB where it is another one
    up: str | None = None  # axis that points up; None where that is unknown


@dataclass(frozen=True)
class Frame:
    """Coordinates of an exported file."""

    matrix: np.ndarray  # file = matrix x (x, y, z, 1) of the scene, (4, 4) float64
    source: str  # where that is known from

    def to_scene(self, points: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Bring points of the file into the scene. (V, 3) -> (V, 3) float64

        Args:
            points: Vertices of the file. (V, 3)
            offset: What was subtracted from the coordinates of the capture. An export in these
                coordinates, which lies where the offset is, is moved back. (3,)
        """
        inverse = np.linalg.inv(self.matrix)
        moved = points @ inverse[:3, :3].T + inverse[:3, 3]
        center = np.median(moved, axis=0)
        if np.linalg.norm(center - offset) < np.linalg.norm(center):
            return moved - offset
        return moved


def frame_of(path: Path, given: str | None = None) -> Frame:
    """Return the coordinates of an exported file.

    Args:
        path: The file.
        given: A record somewhere else, or ``none`` for a file that was not moved; None to look for
            a record beside the file.

    Raises:
        UserError: A record is damaged or missing.
    """
    if given == UNMOVED:
        return _unmoved(path)
    if given is not None:
        record = Path(given)
        if not record.is_file():
            raise UserError(f"--exported_transform {given}: no such file; or pass {UNMOVED}")
        frame = _recorded(path, record)
        if frame is None:
            raise UserError(f"--exported_transform {given}: has no matrix; or pass {UNMOVED}")
        return frame
    for record in _records(path):
        if record.is_file():
            frame = _recorded(path, record)
            if frame is not None:
                return frame
    expected = _expected_record(path)
    if expected is not None:
        raise UserError(
            f"{path}: no {expected} beside it says where it stands; pass it as "
            f"--exported_transform, or {UNMOVED} for a file that was not moved"
        )
    return _unmoved(path)


def matrix_to_scene(path: Path, notify: Notify) -> np.ndarray:
    """Return the matrix from what is read of a result to the scene. (4, 4)

    Files in the folder of results stand upright, and copies and exports may have been moved.

    Args:
        path: The result.
        notify: Called with a line where a record is missing.

    Raises:
        UserError: It is an export whose axes are unknown.
    """
    is_plain = path.suffix.lower() in CAPTURE_AXES
    for record in _records(path):
        frame = _recorded(path, record) if record.is_file() else None
        if frame is None:
            continue
        if not is_plain:
            raise UserError(f"{path}: was moved when it was exported; pass what it was made of")
        return np.linalg.inv(frame.matrix)
    expected = _expected_record(path)
    if is_plain and expected is not None:
        notify(
            f"note: no {expected} beside {path.name} says where it stands; it is taken to be in "
            "the world of the cameras"
        )
    return np.eye(4)


def stands_upright(path: Path) -> bool:
    """Return whether a mesh or Gaussians have y up, as the folder of results has them.

    Files whose format wants y up are turned to the axes of a capture when they are read.
    """
    if path.suffix.lower() not in CAPTURE_AXES:
        return False
    for record in _records(path):
        if record.is_file() and _recorded(path, record) is not None:
            return _read_record(record).up == UP
    return False


def _unmoved(path: Path) -> Frame:
    matrix = GLB_AXES if path.suffix.lower() == _GLB else np.eye(4)
    return Frame(matrix, "not moved")


def _records(path: Path) -> list[Path]:
    """Return the files beside a mesh that may say where it stands, the surest first."""
    records = [path.with_name(f"{path.name}.json"), path.with_suffix(".json")]
    expected = _expected_record(path)
    if expected is not None:
        records.append(path.with_name(expected))
    return list(dict.fromkeys(records))


def _expected_record(path: Path) -> str | None:
    """Return the name of the record that a file must have by its name; None for any other file."""
    if path.stem in _RESULT_NAMES:
        return _TRANSFORM
    copy = path.stem.removesuffix(_GAUSSIANS)
    return f"{copy}.json" if copy.endswith(PLACED) else None


def _recorded(path: Path, record: Path) -> Frame | None:
    """Return the coordinates that a record tells; None if it is about something else."""
    content = _read_record(record)
    rows = content.matrix
    if path.suffix.lower() == _GLB and content.glb_matrix is not None:
        rows = content.glb_matrix
    if rows is None:
        return None
    matrix = np.array(rows, dtype=np.float64)
    if abs(np.linalg.det(matrix)) < _SMALLEST_VOLUME:
        raise UserError(f"{record}: its matrix cannot be undone; export the mesh again")
    return Frame(matrix, f"moved as {record.name} says")


def _read_record(record: Path) -> _Record:
    return msgspec.convert(read_checked(record, _Record), _Record)
