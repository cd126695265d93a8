# SPDX-License-Identifier: Apache-2.0
"""Readers of the cameras that other programs found, one per format, with the same signature.

Cameras are brought to COLMAP's axes (x right, y down, z forward) and pixels, which count from the
corner of the image.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from gaussian_splatting.data.cameras import nearest_rotation
from gaussian_splatting.data.names import ENCODINGS
from sugar_utils.errors import UserError, explained
from sugar_utils.files import decoded, read_json, require_regular_file
from sugar_utils.libraries import load_pycolmap
from sugar_utils.schemas import FAR, Coordinate, FileName, PixelCount, Positive, conform

MAX_MISFIT = 0.1  # pixels by which a lens may differ from that of the file
_FLIP = np.diag([1.0, -1.0, -1.0])  # to COLMAP's axes from cameras that look along -z with y up
_AGAIN = "export the cameras again"
_XCR = "{http://www.capturingreality.com/ns/xcr/1.1#}"
_NO_POSE = "without a position or rotation"
NO_IMAGE = "of images that are not here"
_DISABLED = "disabled"
Size = tuple[int, int]  # width and height in pixels
SizeOf = Callable[[str], Size | None]  # size of the image that a name means; None: there is none

_PLACE = ("x", "y", "alt")
_ROTATION = ("heading", "pitch", "roll")
_POSE = (*_PLACE, *_ROTATION, "f")
_OPTIONAL = ("px", "py", "k1", "k2", "k3", "k4", "t1", "t2")
_COLUMNS = {
    "name": ("image", "image_name", "imagename", "label", "file", "filename", "file_name"),
    "x": ("easting", "east", "pos_x", "position_x", "x_m"),
    "y": ("northing", "north", "pos_y", "position_y", "y_m"),
    "alt": ("z", "altitude", "height", "elevation", "pos_z", "position_z", "z_m"),
    "heading": ("yaw", "azimuth"),
    "f": ("focal", "focal_length", "focallength", "focal35mm", "focallength35mm", "f35"),
    "px": ("ppx", "principal_point_u", "principalpointu"),
    "py": ("ppy", "principal_point_v", "principalpointv"),
}
"""Other names of columns than RealityScan's, by its own."""
_DISTORTION = {"disto_k1": 1, "disto_k3": 3, "disto_t2": 5, "fisheye": 4}
_BROWN = ("perspective", "simple_radial", "radial", "brown")
_FISHEYE = ("fisheye", "fisheye_opencv")
_SIDES = dict.fromkeys(("width", "height"), (PixelCount | None, None))
_UNCORRECTED = "cameras"  # folder beside that of the corrected cameras


@dataclass(frozen=True, eq=False)
class KnownCamera:
    name: str  # of the image, as the file has it: perhaps without folder or extension
    lens: Any  # pycolmap.Camera
    rotation: np.ndarray  # world to camera, (3, 3)
    center: np.ndarray  # (3,) world units


@dataclass(frozen=True)
class SkippedCamera:
    """A camera of a file that cannot be used; how many there are is told for each reason."""

    name: str  # of the image, as the file has it
    reason: str  # completes "cameras are ..."


Entries = Iterator[KnownCamera | SkippedCamera]


@dataclass(frozen=True)
class Format:
    program: str
    places: tuple[str, ...]  # patterns in a folder; the first that finds files counts
    accepts: Callable[[Path], bool]  # whether a file is of this format
    read: Callable[[Sequence[Path], SizeOf], Entries]
    many: bool = False  # all files together are one set of cameras


def _numbers(text: str | None, count: int, place: str) -> np.ndarray:
    with explained(f"{place}:", _AGAIN, ValueError):
        values = np.array([float(word) for word in (text or "").split()])
    if len(values) != count or not (np.abs(values) <= FAR).all():
        raise UserError(f"{place}: needs {count} finite numbers, not {text!r:.40}; {_AGAIN}")
    return values


def _number(text: str | None, place: str) -> float:
    return float(_numbers(text, 1, place)[0])


def _rotation(matrix: Any, place: str) -> np.ndarray:
    rotation = nearest_rotation(np.reshape(matrix, (3, 3)))
    if rotation is None:
        raise UserError(f"{place}: is no rotation; {_AGAIN}")
    return rotation


def _lens(
    size: Any,
    focal: Any,
    middle: Any,
    place: str,
    k: Sequence[float] = (),
    p: Sequence[float] = (0, 0),
    fisheye: bool = False,
) -> Any:
    """The pycolmap.Camera of a lens, whose distortion is in the order of OpenCV."""
    if not min(*size, *focal) > 0:
        raise UserError(f"{place}: has no positive size and focal length; {_AGAIN}")
    k1, k2, k3, k4 = (*k, 0, 0, 0, 0)[:4]
    if k4 and not fisheye:
        raise UserError(f"{place}: k4 is not supported; align or optimize the cameras without it")
    if fisheye and any(p):
        model = "THIN_PRISM_FISHEYE"
        distortion = (k1, k2, *p, k3, k4, 0, 0)
    elif fisheye:
        model = "OPENCV_FISHEYE"
        distortion = (k1, k2, k3, k4)
    elif k3:
        model = "FULL_OPENCV"
        distortion = (k1, k2, *p, k3, 0, 0, 0)
    else:
        model, distortion = ("OPENCV", (k1, k2, *p)) if any((k1, k2, *p)) else ("PINHOLE", ())
    params = [float(x) for x in (*focal, *middle, *distortion)]
    width, height = map(round, size)
    camera = load_pycolmap().Camera(model=model, width=width, height=height, params=params)
    camera.has_prior_focal_length = True
    return camera


def _bytes(path: Path, count: int = -1) -> bytes:
    with (
        explained(f"cannot read {path}:", "check the path"),
        require_regular_file(path).open("rb") as file,
    ):
        return file.read(count)


def _text(path: Path, count: int = -1) -> str:
    """The text of a file; bytes that are no UTF-8 are kept as :func:`os.fsdecode` keeps them."""
    content = _bytes(path, count)
    if count >= 0:
        # Not half of a character of 16 bits.
        content = content[: len(content) // 2 * 2]
    return _decoded(content).replace("\0", "")


def _decoded(content: bytes) -> str:
    with contextlib.suppress(UnicodeError):
        return decoded(content, "surrogateescape")
    return content.decode("utf-8", "surrogateescape")


def _xml(path: Path) -> ET.Element:
    with explained(f"{path}: not valid XML", _AGAIN, ET.ParseError, ValueError, LookupError):
        return ET.fromstring(_bytes(path))


def _child(parent: ET.Element, name: str, place: str) -> ET.Element:
    found = parent.find(name)
    if found is None:
        raise UserError(f"{place}: has no {name}; {_AGAIN}")
    return found


def read_metashape(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``cameras.xml`` of Metashape; cameras that are disabled or not aligned are left out."""
    path = files[0]
    chunks = [chunk for chunk in _xml(path).iterfind("chunk") if chunk.find("cameras") is not None]
    if len(chunks) != 1:
        raise UserError(f"{path}: {len(chunks)} chunks with cameras; export a single chunk")
    chunk = chunks[0]
    lenses = {}
    sensors = {sensor.get("id"): sensor for sensor in chunk.iterfind("sensors/sensor")}
    listed = list(chunk.iterfind("cameras//camera"))
    # Masters of rigs; files that were joined may use a number twice.
    cameras = {camera.get("id"): camera for camera in reversed(listed)}
    worlds = {c.get("id"): c.find("transform") for c in chunk.iterfind("components/component")}
    for camera in listed:
        place = f"{path}, camera {camera.get('label')}"
        sensor = camera.get("sensor_id")
        label = camera.get("label", "")
        if camera.get("enabled", "true").lower() in ("false", "0"):
            yield SkippedCamera(label, _DISABLED)
            continue
        if sensor not in sensors:
            raise UserError(f"{place}: sensor_id {sensor} is not among the sensors; {_AGAIN}")
        matrix = _metashape_pose(camera, cameras, sensors, place)
        if matrix is None:
            yield SkippedCamera(label, _NO_POSE)
            continue
        if sensor not in lenses:
            lenses[sensor] = _metashape_lens(sensors[sensor], f"{path}, sensor {sensor}")
        rotation = _rotation(matrix[:3, :3], f"{place}, transform").T
        center = matrix[:3, 3]
        # Cameras of a rig may name the component at their master only.
        master = cameras.get(camera.get("master_id"), camera)
        component = camera.get("component_id") or master.get("component_id")
        world = worlds.get(component)
        world = chunk.find("transform") if world is None else world
        if world is not None:
            where = f"{path}, transform of the chunk"
            turn, shift, scale = (
                _numbers(_child(world, name, where).text, count, f"{where}, {name}")
                for name, count in (("rotation", 9), ("translation", 3), ("scale", 1))
            )
            turn = _rotation(turn, f"{where}, rotation")
            rotation = rotation @ turn.T
            center = scale * (turn @ center) + shift
        elif len(worlds) > 1:
            raise UserError(f"{path}: {len(worlds)} components without a common world; merge them")
        yield KnownCamera(label, lenses[sensor], rotation, center)


def _metashape_pose(
    camera: ET.Element,
    cameras: Mapping[str | None, ET.Element],
    sensors: Mapping[str | None, ET.Element],
    place: str,
) -> np.ndarray | None:
    """Camera to chunk, (4, 4); None for a camera that is not aligned.

    A camera of a rig has the pose of its master, moved as its sensor lies beside the master's.
    """
    pose = camera.find("transform")
    if pose is not None:
        return _numbers(pose.text, 16, f"{place}, transform").reshape(4, 4)
    master = cameras.get(camera.get("master_id"))
    sensor = sensors[camera.get("sensor_id")]
    rotation = sensor.find("rotation")
    location = sensor.find("location")
    pose = None if master is None else master.find("transform")
    if pose is None or rotation is None or location is None:
        return None
    where = f"{place}, sensor {camera.get('sensor_id')}"
    in_rig = np.eye(4)
    in_rig[:3, :3] = _rotation(_numbers(rotation.text, 9, f"{where}, rotation"), where)
    in_rig[:3, 3] = _numbers(location.text, 3, f"{where}, location")
    return _numbers(pose.text, 16, f"{place}, transform of the master").reshape(4, 4) @ in_rig


def _metashape_lens(sensor: ET.Element, place: str) -> Any:
    """Agisoft's p1 and p2 are OpenCV's p2 and p1, and cx and cy count from the middle."""
    found = sensor.find("calibration[@class='adjusted']")
    found = _child(sensor, "calibration", place) if found is None else found
    kind = found.get("type") or sensor.get("type") or "frame"
    holder = sensor if found.find("resolution") is None else found
    resolution = _child(holder, "resolution", place)
    size = [_number(resolution.get(side), f"{place}, {side}") for side in ("width", "height")]
    f = _number(_child(found, "f", place).text, f"{place}, f")
    cx, cy, b1, b2, p1, p2, p3, p4, *k = (
        _number(found.findtext(name, "0"), f"{place}, {name}")
        for name in ("cx", "cy", "b1", "b2", "p1", "p2", "p3", "p4", "k1", "k2", "k3", "k4")
    )
    if kind not in ("frame", "fisheye", "equidistant_fisheye"):
        raise UserError(f"{place}: camera type {kind} is not supported; use frame or fisheye")
    if p3 or p4 or abs(b2) * size[1] > 2 * MAX_MISFIT * abs(f):
        wrong = "p3 and p4 are" if p3 or p4 else "b2 is"
        raise UserError(f"{place}: {wrong} not supported; optimize the cameras without it")
    middle = size[0] / 2 + cx, size[1] / 2 + cy
    return _lens(size, (f + b1, f), middle, place, k, (p2, p1), kind != "frame")


def _lens_35mm(size: Size, f: float, u: float, v: float, k: Any, place: str) -> Any:
    """RealityScan's: f for a width of 36 mm, middle in longer sides; t1, t2 are p2, p1."""
    n = max(size)
    middle = size[0] / 2 + u * n, size[1] / 2 + v * n
    return _lens(size, (f / 36 * n, f / 36 * n), middle, place, k[:4], (k[5], k[4]))


def _table(text: str) -> csv.DictReader:
    """A table whose columns have the names of RealityScan, where they mean the same."""
    lines = text.splitlines()
    header = lines[0] if lines else ""
    delimiter = max(",;\t", key=header.count)
    names = [_column(name) for name in header.split(delimiter)]
    return csv.DictReader(lines[1:], names, delimiter=delimiter, skipinitialspace=True)


def _column(text: str) -> str:
    """RealityScan's name for a column: in lower case, without units in brackets."""
    name = re.sub(r"[\[(].*?[\])]", "", text.strip().strip('"').lstrip("#")).strip().lower()
    name = re.sub(r"[\s-]+", "_", name)
    return next((known for known, others in _COLUMNS.items() if name in others), name)


def _is_reality_csv(path: Path) -> bool:
    return not lacking_columns(path)


def lacking_columns(path: Path) -> list[str]:
    """Columns that a table of cameras needs and that a file does not have."""
    names = _table(_text(path, 4096)).fieldnames or ()
    return [name for name in ("name", *_POSE) if name not in names]


def read_reality_csv(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """The list of "Internal/External camera parameters" of RealityScan (RealityCapture).

    Rows without a position or a rotation, of images that were not aligned, are skipped.
    """
    rotated = load_pycolmap().Rotation3d
    with explained(f"{files[0]}:", _AGAIN, csv.Error):
        table = _table(_text(files[0]))
        rows = [*table]
    for line, row in enumerate(rows, start=2):
        name = (row["name"] or "").strip()
        size = size_of(name)
        place = f"{files[0]}, line {line}"
        if not any(row.get(column) for column in table.fieldnames or ()):
            continue
        if size is None:
            yield SkippedCamera(name, NO_IMAGE)
            continue
        if not all((row[column] or "").strip() for column in (*_PLACE, *_ROTATION)):
            yield SkippedCamera(name, _NO_POSE)
            continue
        if table.reader.dialect.delimiter == ";":
            # Where commas separate decimals.
            row = {column: (row[column] or "").replace(",", ".") for column in _with_values(row)}
        row = dict.fromkeys(_OPTIONAL, "0") | _with_values(row)
        values = (_number(row.get(name), f"{place}, {name}") for name in (*_POSE, *_OPTIONAL))
        x, y, z, heading, pitch, roll, f, u, v, *k = values
        about_z, about_x, about_y = (
            rotated(np.radians(turn)).matrix()
            for turn in ((0, 0, -heading), (pitch, 0, 0), (0, roll, 0))
        )
        rotation = _FLIP @ (about_z @ about_x @ about_y).T
        lens = _lens_35mm(size, f, u, v, k, place)
        yield KnownCamera(name, lens, rotation, np.array([x, y, z]))


def _with_values(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row that are not empty."""
    return {name: text for name, text in row.items() if isinstance(text, str) and text.strip()}


def read_reality_xmp(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """XMP files of RealityScan (RealityCapture), one beside each image."""
    for path in files:
        texts = dict(pair for e in _xml(path).iter() for pair in (*e.items(), (e.tag, e.text)))
        size = size_of(path.stem)
        model = texts.get(f"{_XCR}DistortionModel", "perspective")
        if size is None:
            yield SkippedCamera(path.stem, NO_IMAGE)
            continue
        if not {f"{_XCR}Rotation", f"{_XCR}Position"} <= texts.keys():
            yield SkippedCamera(path.stem, _NO_POSE)
            continue

        def values(
            name: str,
            count: int = 1,
            unset: str | None = None,
            texts: Any = texts,
            path: Path = path,
        ) -> np.ndarray:
            return _numbers(texts.get(_XCR + name, unset), count, f"{path}, xcr:{name}")

        # Spelt with one f in the files.
        k = values("DistortionCoeficients", 6, "0 0 0 0 0 0")
        if k.any() and not model.startswith(("brown", "perspective")):
            raise UserError(
                f"{path}, xcr:DistortionModel: {model} is not supported; choose a Brown model in "
                "the settings of the alignment"
            )
        if values("Skew", unset="0") != 0 or values("AspectRatio", unset="1") != 1:
            raise UserError(f"{path}: xcr:Skew and xcr:AspectRatio must be 0 and 1; {_AGAIN}")
        inner = [values(n)[0] for n in ("FocalLength35mm", "PrincipalPointU", "PrincipalPointV")]
        rotation = _rotation(values("Rotation", 9), f"{path}, xcr:Rotation")
        lens = _lens_35mm(size, *inner, k, str(path))
        yield KnownCamera(path.stem, lens, rotation, values("Position", 3))


def read_bundler(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``bundle.out`` of Bundler, and ``list.txt`` beside it or above."""
    path = files[0]
    lines = iter(_text(files[0]).splitlines()[1:])
    lists = [folder / "list.txt" for folder in (path.parent, path.parent.parent)]
    listed = next((file for file in lists if file.is_file()), lists[0])
    # After a name, which may have spaces, there may be a zero and the focal length.
    names = [
        re.sub(r"\s+[-+\d.]+\s+[-+\d.eE]+\s*$", "", line).strip().strip('"')
        for line in _text(listed).splitlines()
        if line.strip()
    ]
    count = _numbers(next(lines, ""), 2, f"{path}, line 2")[0]
    if count != len(names):
        raise UserError(f"{path}: {count:g} cameras, but {listed} has {len(names)}; {_AGAIN}")
    for name in names:
        place = f"{path}, camera of {name}"
        size = size_of(name)
        f, *values = _numbers(" ".join(itertools.islice(lines, 5)), 15, place)
        if size is None or f == 0:
            yield SkippedCamera(name, NO_IMAGE if size is None else _NO_POSE)
            continue
        lens = _lens(size, (f, f), (size[0] / 2, size[1] / 2), place, values[:2])
        rotation = _rotation(values[2:11], f"{place}, R")
        yield KnownCamera(name, lens, _FLIP @ rotation, -rotation.T @ values[11:])


def _record(**fields: Any) -> Any:
    """A type of JSON objects; a pair is the type of a field and what it is where it is missing."""
    pairs = ((name, kind if isinstance(kind, tuple) else (kind,)) for name, kind in fields.items())
    return msgspec.defstruct("Record", [(name, *kind) for name, kind in pairs])


def _listed(kind: Any, *bounds: int) -> Any:
    low, high = (*bounds, *bounds)[:2]
    return Annotated[list[kind], msgspec.Meta(min_length=low, max_length=high)]


_VECTOR = _listed(Coordinate, 3)
_INTRINSIC = _record(
    width=PixelCount,
    height=PixelCount,
    focal_length=Coordinate,
    principal_point=_listed(Coordinate, 2),
    **{name: (_listed(Coordinate, n) | None, None) for name, n in _DISTORTION.items()},
)
_VIEW = _record(filename=FileName, id_intrinsic=int, id_pose=int, local_path=(str, ""))
_OPENMVG = _record(
    extrinsics=list[_record(key=int, value=_record(rotation=_listed(_VECTOR, 3), center=_VECTOR))],
    **{
        name: list[_record(key=int, value=_record(ptr_wrapper=_record(data=kind)))]
        for name, kind in (("views", _VIEW), ("intrinsics", dict[str, Any]))
    },
)


def read_openmvg(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``sfm_data.json`` of OpenMVG, whose pixels have their middles at whole numbers."""
    path = files[0]
    found = conform(read_json(path, ENCODINGS), _OPENMVG, path, _AGAIN)
    poses = {entry.key: entry.value for entry in found.extrinsics}
    lenses = {}
    for entry in found.intrinsics:
        data = entry.value.ptr_wrapper.data
        place = f"{path}, intrinsic {entry.key}"
        # Newer versions have one object in another.
        inner = conform(data.get("value0", {}), dict[str, Any], place, _AGAIN)
        data = conform({**inner, **data}, _INTRINSIC, place, "spherical cameras are not supported")
        k = data.fisheye or data.disto_k1 or data.disto_k3 or data.disto_t2 or ()
        k, p = (k[:3], k[3:]) if k is data.disto_t2 else (k, (0, 0))
        size = (data.width, data.height)
        f = data.focal_length
        middle = [c + 0.5 for c in data.principal_point]
        lenses[entry.key] = _lens(size, (f, f), middle, place, k, p, data.fisheye is not None)
    for view in (entry.value.ptr_wrapper.data for entry in found.views):
        pose = poses.get(view.id_pose)
        place = f"{path}, view of {view.filename}"
        if pose is None:
            yield SkippedCamera(view.filename, _NO_POSE)
            continue
        if view.id_intrinsic not in lenses:
            raise UserError(f"{place}: id_intrinsic {view.id_intrinsic} is missing; {_AGAIN}")
        rotation = _rotation(pose.rotation, f"{place}, rotation")
        name = f"{view.local_path}/{view.filename}".lstrip("/")
        yield KnownCamera(name, lenses[view.id_intrinsic], rotation, np.array(pose.center))


_OPENSFM = _listed(
    _record(
        cameras=dict[
            str,
            _record(
                width=PixelCount,
                height=PixelCount,
                projection_type=(str, "perspective"),
                **dict.fromkeys(("focal", "focal_x", "focal_y"), (Positive | None, None)),
                **dict.fromkeys(
                    ("c_x", "c_y", "k1", "k2", "k3", "k4", "p1", "p2"), (Coordinate, 0.0)
                ),
            ),
        ],
        shots=dict[FileName, _record(camera=str, rotation=_VECTOR, translation=_VECTOR)],
    ),
    1,
    1 << 30,
)


def read_opensfm(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``reconstruction.json`` of OpenSfM and OpenDroneMap; of several parts the largest."""
    path = files[0]
    lenses = {}
    parts = conform(read_json(path, ENCODINGS), _OPENSFM, path, _AGAIN)
    part = max(parts, key=lambda part: len(part.shots))
    for name, camera in part.cameras.items():
        kind = camera.projection_type
        place = f"{path}, camera {name}"
        if kind not in _BROWN + _FISHEYE:
            raise UserError(f"{place}: projection_type {kind} is not supported; choose brown")
        # Lengths count in longer sides of the image, from its middle.
        size = camera.width, camera.height
        n = max(size)
        focal = [(f or camera.focal or 0) * n for f in (camera.focal_x, camera.focal_y)]
        middle = size[0] / 2 + camera.c_x * n, size[1] / 2 + camera.c_y * n
        k = (camera.k1, camera.k2, camera.k3, camera.k4)
        p = (camera.p1, camera.p2)
        lenses[name] = _lens(size, focal, middle, place, k, p, kind in _FISHEYE)
    for name, shot in part.shots.items():
        if shot.camera not in lenses:
            raise UserError(f"{path}, shot {name}: camera {shot.camera} is missing; {_AGAIN}")
        # Axis times angle.
        rotation = load_pycolmap().Rotation3d(np.array(shot.rotation)).matrix()
        center = -rotation.T @ np.array(shot.translation)
        yield KnownCamera(name, lenses[shot.camera], rotation, center)


_FRAME_SIZE = _record(**_SIDES)
_KEYFRAME = _record(
    **dict.fromkeys(("fx", "fy", "cx", "cy"), Coordinate),
    **{f"t_{i}{j}": Coordinate for i in range(3) for j in range(4)},
    **_SIDES,
)


def read_polycam(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``keyframes`` of Polycam's raw data, one file per image: camera to world."""
    for path in files:
        frame = conform(read_json(path, ENCODINGS), _KEYFRAME, path, _AGAIN)
        pose = np.array([[getattr(frame, f"t_{i}{j}") for j in range(4)] for i in range(3)])
        rotation = _FLIP @ _rotation(pose[:, :3], f"{path}, t_00 to t_22").T
        size = _frame_size(frame, path, size_of)
        lens = _lens(size, (frame.fx, frame.fy), (frame.cx, frame.cy), str(path))
        yield KnownCamera(path.stem, lens, rotation, pose[:, 3])


def _frame_size(frame: Any, path: Path, size_of: SizeOf) -> tuple[float, float]:
    """Width and height of a keyframe: its own, or those of the image or of the frame as taken.

    Where both are known the one counts whose middle is nearer to the principal point.
    """
    if frame.width is not None and frame.height is not None:
        return frame.width, frame.height
    sizes = [size_of(path.stem)]
    uncorrected = path.parent.parent / _UNCORRECTED / path.name
    if uncorrected.is_file():
        other = conform(read_json(uncorrected, ENCODINGS), _FRAME_SIZE, uncorrected, _AGAIN)
        sizes.append((other.width, other.height))
    known_sizes = [size for size in sizes if size is not None and None not in size]
    if not known_sizes:
        raise UserError(f"{path}: has no width and height, and there is no image of it; {_AGAIN}")

    def offset(size: tuple[float, float]) -> float:
        return abs(frame.cx / size[0] - 0.5) + abs(frame.cy / size[1] - 0.5)

    return min(known_sizes, key=offset)


_RECORD3D = _record(
    w=PixelCount,
    h=PixelCount,
    K=_listed(Coordinate, 9),
    poses=list[_listed(Coordinate, 7)],
    perFrameIntrinsicCoeffs=(list[_listed(Coordinate, 4)], []),
)


def read_record3d(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """``metadata.json`` of Record3D: quaternions x, y, z, w and centres, camera to world."""
    found = conform(read_json(files[0], ENCODINGS), _RECORD3D, files[0], _AGAIN)
    own = found.perFrameIntrinsicCoeffs
    shared = [found.K[i] for i in (0, 4, 6, 7)]
    for n, pose in enumerate(found.poses):
        fx, fy, cx, cy = own[n] if n < len(own) else shared
        place = f"{files[0]}, pose {n}"
        quaternion = np.array(pose[:4])
        lens = _lens((found.w, found.h), (fx, fy), (cx, cy), place)
        turn = load_pycolmap().Rotation3d(quaternion).matrix() * (quaternion @ quaternion)
        rotation = _rotation(turn, f"{place}, quaternion")
        yield KnownCamera(str(n), lens, _FLIP @ rotation.T, np.array(pose[4:]))


def _with(*words: bytes, within: int = 4096) -> Callable[[Path], bool]:
    """Whether the beginning of a file has all words."""
    return lambda path: all(word in _bytes(path, within) for word in words)


FORMATS = (
    Format("Metashape", ("*.xml",), _with(b"<document", b"<chunk"), read_metashape),
    Format("RealityScan", ("*.csv",), _is_reality_csv, read_reality_csv),
    Format("RealityScan", ("**/*.xmp",), _with(_XCR[1:-1].encode()), read_reality_xmp, many=True),
    Format("Bundler", ("bundle.out", "bundle/bundle.out"), _with(b"# Bundle file"), read_bundler),
    Format("OpenMVG", ("sfm_data.json",), _with(b'"sfm_data_version"'), read_openmvg),
    Format(
        "OpenSfM",
        ("reconstruction.json", "opensfm/reconstruction.json"),
        _with(b'"cameras"'),
        read_opensfm,
    ),
    Format(
        "Polycam",
        ("keyframes/corrected_cameras/*.json", "keyframes/cameras/*.json"),
        _with(b'"t_00"'),
        read_polycam,
        many=True,
    ),
    Format("Record3D", ("metadata.json",), _with(b'"poses"', within=-1), read_record3d),
)
