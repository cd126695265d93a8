# SPDX-License-Identifier: Apache-2.0
"""Where an exported file stands: upright, in metres, on a map, or in the original frame."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gaussian_splatting.formats.placement import METRE, Origin, Placement
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.export_options import ExportOptions
from sugar_extractors.export.format_types import WORLD_OF_UP, World
from sugar_extractors.placing import PlacementOptions, placing_matrix, scale_of
from sugar_extractors.results import Capture, capture_of, scene_of
from sugar_maps.map_placement import MapPlacement
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import Notify, UserError


@dataclass
class ExportPlacement:
    """Where a result stands, and where its export does.

    A result starts from where its file stands, or from the scene where it is turned upright, put
    on a map, or brought back to the original frame.
    """

    options: ExportOptions
    source: Placement  # of the result as it is read
    notify: Notify
    place: MapPlacement | None = None  # on the map; None for other worlds
    is_in_metres: bool = False  # whether the scale that is asked for is that to metres

    @cached_property
    def capture(self) -> Capture:
        """The folders that the result was made from, by the flags and the records."""
        options = self.options
        return capture_of([self.main_file], options.scene_path, options.checkpoint_path)

    @cached_property
    def scene(self) -> Scene:
        """The capture that the result was made from."""
        if self.capture.scene is None:
            raise UserError(
                "--gcp, --gps, --targets, --original_frame, --orient up, and --known_distance "
                "where it is not by points x,y,z, need -s/--scene_path"
            )
        return scene_of(self.capture, SugarSize(), self.notify)

    @property
    def main_file(self) -> Path:
        """The file that says where the result stands."""
        return self.options.main_file

    @property
    def starts_in_scene(self) -> bool:
        """Whether the result is brought to the world of the cameras before it is placed."""
        options = self.options
        is_upright = options.placement.orient == "up"
        return is_upright or options.map_flags.wanted or options.original_frame

    def to_start(self, placement: Placement) -> np.ndarray:
        """Return the matrix from where a file stands to where the export starts. (4, 4)"""
        if self.starts_in_scene:
            return placement.to_scene(self.scene.offset)
        if np.array_equal(placement.matrix, self.source.matrix):
            return np.eye(4)
        return self.source.matrix @ placement.to_scene(self.source.origin.world_offset)

    @property
    def world(self) -> World:
        """Axes of the world in which the result is exported."""
        world = self.options.world
        if world is not World.CAPTURE or self.starts_in_scene:
            return world
        return WORLD_OF_UP.get(self.source.up or "", World.CAPTURE)

    @property
    def keeps_metres(self) -> bool:
        """Whether a result in metres stays so."""
        options = self.options
        is_rescaled = options.placement.is_scaled or options.map_flags.wanted
        return self.source.is_metric and not is_rescaled and not options.original_frame

    @property
    def is_metric(self) -> bool:
        """Whether a unit of the exported file is a metre."""
        is_known = self.is_in_metres or self.options.placement.known_distance is not None
        return self.place is not None or is_known or self.keeps_metres

    @property
    def scales_capture(self) -> bool:
        """Whether the scale is that of the capture, however large the result is already.

        It is where it leads to metres; else it makes the result so many times as large.
        """
        is_for_printers = self.options.format.for_printers
        is_known = self.is_in_metres or self.options.placement.known_distance is not None
        return is_known or is_for_printers or self.source.is_metric

    @property
    def offset(self) -> np.ndarray:
        """Offset from coordinates near the origin to full coordinates. (3,)"""
        if self.place is not None:
            return self.place.offset
        return self.scene.offset if self.options.original_frame else np.zeros(3)

    def matrix(self, points: np.ndarray) -> np.ndarray:
        """Return the matrix that places points, (P, 3), from where the export starts. (4, 4)"""
        if self.place is not None:
            return self.place.matrix
        options = self.options.placement
        cameras = self.scene.calibrated_cameras if options.needs_cameras else []
        scale = None
        if options.is_scaled:
            world_offset = self.scene.offset if cameras else None
            scale = scale_of(cameras, options, world_offset)
            if self.scales_capture and not self.starts_in_scene:
                scale /= self.source.scale
        elif self.keeps_metres and self.starts_in_scene:
            scale = self.source.scale
        placement = PlacementOptions(options.orient, scale)
        if options.orient != "up":
            return placing_matrix([], np.zeros((0, 3)), points, placement)
        return placing_matrix(cameras, self.scene.points, points, placement)

    def target(self, matrix: np.ndarray, offset: np.ndarray | None = None) -> Placement:
        """Return where a file stands that is written.

        Args:
            matrix: From where the export starts to its coordinates near the origin. (4, 4)
            offset: That its coordinates have in addition, in its axes, (3,); None: none.
        """
        file_format = self.options.format
        from_scene = matrix if self.starts_in_scene else matrix @ self.source.matrix
        capture = self.capture
        origin = self.source.origin
        world_offset = origin.world_offset
        if self.starts_in_scene:
            world_offset = self.scene.offset
        unit = None
        if self.is_metric or file_format.units_per_metre != 1:
            unit = METRE if file_format.units_per_metre == 1 else "millimetre"
        return Placement(
            from_scene,
            np.zeros(3) if offset is None else offset,
            up=file_format.up(self.world),
            unit=unit,
            map=None if self.place is None else self.place.record(),
            origin=Origin(
                origin.model or self.main_file, capture.scene, capture.checkpoint, world_offset
            ),
        )
