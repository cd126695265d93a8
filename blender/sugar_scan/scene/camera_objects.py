# SPDX-License-Identifier: Apache-2.0
"""Cameras of photographs, with the photographs as backgrounds."""

from collections.abc import Sequence

import bpy

from ..plain.axes import camera_to_file
from ..plain.photographs import SENSOR_WIDTH, Photograph
from .scan_objects import add_collection, add_object, blender_matrix

_SIZE = "sugar_scan_size"  # of the photograph in pixels
_ASPECT = "sugar_scan_pixel_aspect"
_DISPLAY_SHARE = 0.04  # size of a camera's frame, of the distance between the cameras


def add_cameras(photographs: Sequence[Photograph], root: bpy.types.Object) -> None:
    """Add a camera for each photograph, in a collection of their own."""
    collection = add_collection(f"{root.name} photographs", root)
    size = _DISPLAY_SHARE * _spread(photographs)
    for photograph in photographs:
        camera = _camera_of(photograph)
        camera.display_size = size
        added = add_object(photograph.name, camera, root, collection)
        matrix = camera_to_file(photograph.position, photograph.rotation)
        added.matrix_local = blender_matrix(matrix)
        added[_SIZE] = [photograph.width, photograph.height]
        added[_ASPECT] = list(photograph.pixel_aspect)


def is_photograph(camera: bpy.types.Object | None) -> bool:
    """Return whether an object is the camera of a photograph."""
    return camera is not None and camera.type == "CAMERA" and _SIZE in camera


def look_through(camera: bpy.types.Object, scene: bpy.types.Scene) -> None:
    """Make the camera of a photograph that of the scene, with the photograph's pixels."""
    scene.camera = camera
    render = scene.render
    render.resolution_x, render.resolution_y = camera[_SIZE]
    render.resolution_percentage = 100
    render.pixel_aspect_x, render.pixel_aspect_y = camera[_ASPECT]


def _camera_of(photograph: Photograph) -> bpy.types.Camera:
    """Make a camera with the lens of a photograph."""
    camera = bpy.data.cameras.new(photograph.name)
    camera.sensor_fit = "HORIZONTAL"
    camera.sensor_width = SENSOR_WIDTH
    camera.lens = photograph.focal_length
    camera.shift_x, camera.shift_y = photograph.shift
    if photograph.image is not None and photograph.image.is_file():
        background = camera.background_images.new()
        background.image = bpy.data.images.load(str(photograph.image), check_existing=True)
        background.alpha = 1.0
        background.display_depth = "BACK"
        background.frame_method = "STRETCH"
        camera.show_background_images = True
    return camera


def _spread(photographs: Sequence[Photograph]) -> float:
    """Return the longest side of the box around the cameras."""
    sides = []
    for axis in range(3):
        places = [photograph.position[axis] for photograph in photographs]
        sides.append(max(places) - min(places))
    return max(sides) or 1.0
