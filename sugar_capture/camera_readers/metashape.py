# SPDX-License-Identifier: Apache-2.0
"""Reader of ``cameras.xml`` of Agisoft Metashape."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sugar_capture.camera_readers.entries import (
    DISABLED,
    NO_POSE,
    Entries,
    KnownCamera,
    SizeOf,
    SkippedCamera,
)
from sugar_capture.camera_readers.lenses import LensParameters, colmap_lens, require_rotation
from sugar_capture.camera_readers.parsing import (
    EXPORT_AGAIN,
    parse_number,
    parse_numbers,
    read_xml,
    require_child,
)
from sugar_utils.errors import UserError

if TYPE_CHECKING:
    import pycolmap

MAX_MISFIT = 0.1  # pixels by which the lens may differ from that of the file
_CAMERA_TYPES = ("frame", "fisheye", "equidistant_fisheye")
_RADIAL = ("k1", "k2", "k3", "k4")
_COEFFICIENTS = ("cx", "cy", "b1", "b2", "p1", "p2", "p3", "p4", *_RADIAL)


def read_metashape(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read ``cameras.xml``; cameras that are disabled or not aligned are skipped."""
    chunk = _Chunk(files[0])
    for camera in chunk.cameras:
        label = camera.get("label", "")
        if camera.get("enabled", "true").lower() in ("false", "0"):
            yield SkippedCamera(label, DISABLED)
            continue
        chunk.require_sensor(camera)
        matrix = chunk.pose(camera)
        if matrix is None:
            yield SkippedCamera(label, NO_POSE)
            continue
        lens = chunk.lens(camera)
        rotation = require_rotation(matrix[:3, :3], f"{chunk.context(camera)}, transform").T
        center = matrix[:3, 3]
        world = chunk.world_of(camera)
        if world is not None:
            rotation = rotation @ world.rotation.T
            center = world.scale * (world.rotation @ center) + world.translation
        yield KnownCamera(label, lens, rotation, center)


class _World(NamedTuple):
    """The similarity that maps a component or a chunk to the world."""

    rotation: np.ndarray  # (3, 3)
    translation: np.ndarray  # (3,) world units
    scale: np.ndarray  # (1,)


class _Chunk:
    """The chunk of a document that has cameras; reads poses, lenses and the world from it."""

    def __init__(self, path: Path) -> None:
        chunks = [c for c in read_xml(path).iterfind("chunk") if c.find("cameras") is not None]
        if len(chunks) != 1:
            raise UserError(f"{path}: {len(chunks)} chunks with cameras; export a single chunk")
        chunk = chunks[0]
        self._path = path
        self._element = chunk
        self._sensors = {sensor.get("id"): sensor for sensor in chunk.iterfind("sensors/sensor")}
        self._components = {
            component.get("id"): component.find("transform")
            for component in chunk.iterfind("components/component")
        }
        self._lenses: dict[str | None, Any] = {}  # by the id of the sensor
        self.cameras = list(chunk.iterfind("cameras//camera"))
        # Files that were joined may use an id twice; the first camera counts.
        self._by_id = {camera.get("id"): camera for camera in reversed(self.cameras)}

    def context(self, camera: ET.Element) -> str:
        """Name a camera for the message of an error."""
        return f"{self._path}, camera {camera.get('label')}"

    def require_sensor(self, camera: ET.Element) -> None:
        """Raise a ``UserError`` if the sensor of a camera is not in the file."""
        sensor_id = camera.get("sensor_id")
        if sensor_id not in self._sensors:
            raise UserError(
                f"{self.context(camera)}: sensor_id {sensor_id} is not among the sensors; "
                f"{EXPORT_AGAIN}"
            )

    def pose(self, camera: ET.Element) -> np.ndarray | None:
        """Return camera to chunk, (4, 4); None for a camera that is not aligned.

        A camera of a rig has the pose of its master, moved by the offset of its sensor.
        """
        context = self.context(camera)
        transform = camera.find("transform")
        if transform is not None:
            return parse_numbers(transform.text, 16, f"{context}, transform").reshape(4, 4)
        master = self._by_id.get(camera.get("master_id"))
        if master is None:
            return None
        master_transform = master.find("transform")
        sensor = self._sensors[camera.get("sensor_id")]
        rotation = sensor.find("rotation")
        location = sensor.find("location")
        if master_transform is None or rotation is None or location is None:
            return None
        where = f"{context}, sensor {camera.get('sensor_id')}"
        in_rig = np.eye(4)
        rotation_numbers = parse_numbers(rotation.text, 9, f"{where}, rotation")
        in_rig[:3, :3] = require_rotation(rotation_numbers, where)
        in_rig[:3, 3] = parse_numbers(location.text, 3, f"{where}, location")
        master_context = f"{context}, transform of the master"
        master_pose = parse_numbers(master_transform.text, 16, master_context).reshape(4, 4)
        return master_pose @ in_rig

    def lens(self, camera: ET.Element) -> pycolmap.Camera:
        """Return the pycolmap.Camera of a camera; cameras of one sensor share it."""
        sensor_id = camera.get("sensor_id")
        if sensor_id not in self._lenses:
            context = f"{self._path}, sensor {sensor_id}"
            self._lenses[sensor_id] = _sensor_lens(self._sensors[sensor_id], context)
        return self._lenses[sensor_id]

    def world_of(self, camera: ET.Element) -> _World | None:
        """Return the transform of a camera's component, or else of the chunk; None without both."""
        # Cameras of a rig may name the component at their master only.
        master = self._by_id.get(camera.get("master_id"), camera)
        component = camera.get("component_id") or master.get("component_id")
        transform = self._components.get(component)
        if transform is None:
            transform = self._element.find("transform")
        if transform is None:
            if len(self._components) > 1:
                raise UserError(
                    f"{self._path}: {len(self._components)} components without a common world; "
                    "merge them"
                )
            return None
        context = f"{self._path}, transform of the chunk"
        rotation = _child_numbers(transform, "rotation", 9, context)
        translation = _child_numbers(transform, "translation", 3, context)
        scale = _child_numbers(transform, "scale", 1, context)
        return _World(require_rotation(rotation, f"{context}, rotation"), translation, scale)


def _child_numbers(parent: ET.Element, name: str, count: int, context: str) -> np.ndarray:
    child = require_child(parent, name, context)
    return parse_numbers(child.text, count, f"{context}, {name}")


def _sensor_lens(sensor: ET.Element, context: str) -> pycolmap.Camera:
    """Build the pycolmap.Camera of a sensor.

    Agisoft's p1 and p2 are OpenCV's p2 and p1, and cx and cy count from the middle of the image.
    """
    calibration = sensor.find("calibration[@class='adjusted']")
    if calibration is None:
        calibration = require_child(sensor, "calibration", context)
    kind = calibration.get("type") or sensor.get("type") or "frame"
    holder = sensor if calibration.find("resolution") is None else calibration
    resolution = require_child(holder, "resolution", context)
    width = parse_number(resolution.get("width"), f"{context}, width")
    height = parse_number(resolution.get("height"), f"{context}, height")
    f = parse_number(require_child(calibration, "f", context).text, f"{context}, f")
    values = {}
    for name in _COEFFICIENTS:
        values[name] = parse_number(calibration.findtext(name, "0"), f"{context}, {name}")
    if kind not in _CAMERA_TYPES:
        raise UserError(f"{context}: camera type {kind} is not supported; use frame or fisheye")
    if values["p3"] or values["p4"]:
        raise UserError(f"{context}: p3 and p4 are not supported; optimize the cameras without it")
    if abs(values["b2"]) * height > 2 * MAX_MISFIT * abs(f):
        raise UserError(f"{context}: b2 is not supported; optimize the cameras without it")
    lens = LensParameters(
        size=(width, height),
        focal=(f + values["b1"], f),
        middle=(width / 2 + values["cx"], height / 2 + values["cy"]),
        radial=[values[name] for name in _RADIAL],
        tangential=(values["p2"], values["p1"]),
        is_fisheye=kind != "frame",
    )
    return colmap_lens(lens, context)
