# SPDX-License-Identifier: Apache-2.0
"""Tools of the viewer's page: a box, a measure, and a path for the camera."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaussian_splatting.core.subsets import box_of_most, finite_points
from gaussian_splatting.data.cameras import Camera, centers_of
from gaussian_splatting.scenes.reference_layout import write_camera_list
from sugar_utils.command_text import command_text
from sugar_utils.errors import UserError
from sugar_viewer.camera_paths import between, looking
from sugar_viewer.page_server import view_of
from sugar_viewer.shown_models import ShownModel

if TYPE_CHECKING:
    import viser

Post = Callable[[Callable[[], None]], None]  # posts a task to the thread that renders
_BOX_COLOR = (255, 180, 40)
_MEASURE_COLOR = (255, 60, 60)
_PATH_COLOR = (60, 160, 255)
_MOST_FRAMES = 3_600
_LINE_POINTS = 100  # of the line that shows a path
_PATH_SIDE = 1280  # longest side of the cameras of a path, in pixels
_PROBE_PIXELS = 3
_PROBE_ANGLE = math.radians(0.2)  # field of view of the camera that looks along a click
_BOX_DIGITS = 4
_COVERED_SHARE = 0.02  # of the points on each side that a first box excludes: outliers


class BoxPanel:
    """A box with a handle at each of two corners, (3,), and its values as flags to be copied."""

    def __init__(
        self,
        server: viser.ViserServer,
        corners: tuple[np.ndarray, np.ndarray],
        changed: Callable[[], None],
    ) -> None:
        self._scene = server.scene
        self._changed = changed
        self.corners = [np.array(corner, dtype=float) for corner in corners]
        self.cuts = False
        with server.gui.add_folder("Box", expand_by_default=False):
            self._shown = server.gui.add_checkbox("Show the box", False)
            self._cut = server.gui.add_checkbox("Cut to it", False)
            self._text = server.gui.add_text(
                "Flags",
                box_flags(*self.corners),
                multiline=True,
                hint=f"for {command_text('mesh')} and the pipelines",
            )
            self.words = server.gui.add_markdown("")
        size = float(np.linalg.norm(self.corners[1] - self.corners[0]))
        self._lines: viser.LineSegmentsHandle | None = None
        self._handles = []
        for number, corner in enumerate(self.corners):
            handle = self._scene.add_transform_controls(
                f"/box/{number}",
                scale=0.15 * size,
                disable_rotations=True,
                disable_sliders=True,
                depth_test=False,
                position=corner,
                visible=False,
            )
            handle.on_update(partial(self._follow, number))
            self._handles.append(handle)
        self._shown.on_update(lambda _: self._draw())
        self._cut.on_update(lambda _: self._switch())

    def tell(self, outside: Sequence[str]) -> None:
        """Name the results that are not cut because nothing of them lies in the box."""
        names = ", ".join(outside)
        self.words.content = f"Nothing in the box, so shown whole: {names}" if names else ""

    def _follow(self, number: int, event: viser.TransformControlsEvent) -> None:
        self.corners[number] = np.array(self._handles[number].position, dtype=float)
        self._text.value = box_flags(*self.corners)
        self._draw()
        if event.phase == "end" and self.cuts:
            self._changed()

    def _switch(self) -> None:
        self.cuts = self._cut.value
        self._changed()

    def _draw(self) -> None:
        for handle in self._handles:
            handle.visible = self._shown.value
        if self._shown.value:
            edges = box_edges(*self.corners)
            self._lines = _add_lines(self._scene, "/box/lines", edges, _BOX_COLOR, 2.0)
        elif self._lines is not None:
            self._lines.visible = False


class MeasurePanel:
    """Two points on the surface that were clicked on, and their distance.

    Args:
        hit: Returns the point of the surface on a line of sight (origin, direction), or None.
        metres_per_unit: None where the scale is unknown.
    """

    def __init__(
        self,
        server: viser.ViserServer,
        hit: Callable[[np.ndarray, np.ndarray], np.ndarray | None],
        post: Post,
        metres_per_unit: float | None,
        size: float,
    ) -> None:
        self._server = server
        self._hit = hit
        self._post = post
        self._metres = metres_per_unit
        self._size = size
        self.points: list[np.ndarray] = []
        with server.gui.add_folder("Measure", expand_by_default=False):
            self._on = server.gui.add_checkbox("Click on two points", False)
            self.words = server.gui.add_markdown("")
        self._on.on_update(lambda _: self._switch())

    def _switch(self) -> None:
        self._server.scene.remove_click_callback()
        self.points = []
        self._draw()
        if self._on.value:
            self._server.scene.on_click()(self._clicked)

    def _clicked(self, event: viser.SceneClickEvent) -> None:
        origin = np.array(event.ray_origin)
        direction = np.array(event.ray_direction)
        self._post(lambda: self.add(origin, direction))

    def add(self, origin: np.ndarray, direction: np.ndarray) -> None:
        """Add the point on a line of sight; a third one starts a new measurement."""
        point = self._hit(origin, direction)
        if point is None:
            self.words.content = "There is nothing at this point."
            return
        self.points = [*self.points, point] if len(self.points) < 2 else [point]
        self._draw()

    def _draw(self) -> None:
        scene = self._server.scene
        for name in ("0", "1", "line"):
            scene.remove_by_name(f"/measure/{name}")
        for number, point in enumerate(self.points):
            scene.add_icosphere(
                f"/measure/{number}",
                self._size,
                _MEASURE_COLOR,
                position=point,
                cast_shadow=False,
                receive_shadow=False,
            )
        if len(self.points) == 2:
            _add_lines(scene, "/measure/line", np.array([self.points]), _MEASURE_COLOR)
        self.words.content = distance_text(self.points, self._metres) if self._on.value else ""


class PathPanel:
    """A path of the camera through views of the browser, which can be saved."""

    def __init__(self, server: viser.ViserServer, file: Path) -> None:
        self._server = server
        self._file = file
        self.views: list[Camera] = []
        with server.gui.add_folder("Camera path", expand_by_default=False):
            add = server.gui.add_button("Add this view")
            back = server.gui.add_button("Take the last one back")
            self._frames = server.gui.add_number("Frames", 120, min=2, max=_MOST_FRAMES, step=1)
            save = server.gui.add_button("Save")
            self.words = server.gui.add_markdown("")
        add.on_click(lambda event: self._add(event.client))
        back.on_click(lambda _: self._set(self.views[:-1]))
        save.on_click(lambda event: self.save(event.client))

    def _add(self, client: viser.ClientHandle | None) -> None:
        view = None if client is None else view_of(client.camera)
        if view is not None:
            self._set([*self.views, view.camera(_PATH_SIDE)])

    def _set(self, views: list[Camera]) -> None:
        self.views = views
        self.words.content = f"{len(self.views)} views"
        self._server.scene.remove_by_name("/path")
        if len(self.views) > 1:
            cameras = between(self.views, _LINE_POINTS)
            places = centers_of(cameras)
            lines = np.stack([places[:-1], places[1:]], axis=1)
            _add_lines(self._server.scene, "/path", lines, _PATH_COLOR)

    def save(self, client: viser.ClientHandle | None) -> None:
        """Write the path to its file, and offer it to a browser as a download."""
        try:
            frames = min(max(int(self._frames.value), 2), _MOST_FRAMES)
            write_camera_list(self._file, between(self.views, frames))
        except UserError as error:
            self.words.content = str(error)
            return
        command = command_text("render", "RESULT", "-s", "SCENE", "--path", self._file)
        self.words.content = f"`{command}`"
        if client is not None:
            client.send_file_download(self._file.name, self._file.read_bytes())


def _add_lines(
    scene: viser.SceneApi,
    name: str,
    lines: np.ndarray,
    color: tuple[int, int, int],
    width: float = 3.0,
) -> viser.LineSegmentsHandle:
    """Add line segments, (N, 2, 3), with a width in pixels."""
    return scene.add_line_segments(
        name, lines.astype(np.float32), color, thickness=width, thickness_units="screen"
    )


def hit(model: ShownModel, origin: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
    """Return the first point of a model on a line of sight, (3,); None if there is none.

    Args:
        origin: In world units. (3,)
        direction: Of any length. (3,)
    """
    origin = np.asarray(origin, float)
    ahead = np.asarray(direction, float)
    ahead = ahead / np.linalg.norm(ahead)
    rotation = looking(origin, origin + ahead, np.array([0.0, 0.0, 1.0]))
    focal = _PROBE_PIXELS / (2 * math.tan(_PROBE_ANGLE / 2))
    probe = Camera(
        name="probe",
        width=_PROBE_PIXELS,
        height=_PROBE_PIXELS,
        fx=focal,
        fy=focal,
        cx=_PROBE_PIXELS / 2,
        cy=_PROBE_PIXELS / 2,
        rotation=rotation,
        translation=-rotation @ origin,
    )
    depths, _ = model.geometry(probe)
    middle = _PROBE_PIXELS // 2
    depth = float(depths[middle, middle])
    return origin + depth * ahead if math.isfinite(depth) else None


def distance_text(points: Sequence[np.ndarray], metres_per_unit: float | None) -> str:
    """Return the text for points that were clicked on; two of them make a distance."""
    if len(points) < 2:
        return "Click on a second point." if points else "Click on a point of the surface."
    units = float(np.linalg.norm(points[1] - points[0]))
    if metres_per_unit is None:
        return f"{units:.5g} units of the capture"
    return f"{length_text(units * metres_per_unit)} ({units:.5g} units of the capture)"


def length_text(metres: float) -> str:
    """Return a length in metres, centimetres or millimetres."""
    for unit, size in (("m", 1.0), ("cm", 0.01)):
        if metres >= size:
            return f"{metres / size:.4g} {unit}"
    return f"{metres * 1000:.4g} mm"


def box_around(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a box around nearly all points. (P, 3) -> low and high corner, (3,) each"""
    finite = finite_points(points)
    if not len(finite):
        return -np.ones(3), np.ones(3)
    low, high = box_of_most(finite, _COVERED_SHARE)
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def box_flags(one: np.ndarray, other: np.ndarray) -> str:
    """Return the flags of a mesh extraction that is cut to a box between two corners."""
    low = _corner_text(np.minimum(one, other))
    high = _corner_text(np.maximum(one, other))
    return f'--bboxmin "{low}" --bboxmax "{high}"'


def _corner_text(corner: np.ndarray) -> str:
    numbers = ",".join(f"{value:.{_BOX_DIGITS}g}" for value in corner)
    return f"({numbers})"


def box_edges(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the edges of the box between two corners. (12, 2, 3)"""
    corners = np.array(list(itertools.product(*zip(one, other, strict=True))))
    edges = []
    # Corners are numbered by bits, one for each axis; an edge joins numbers that differ in one.
    for bit in (1, 2, 4):
        for number in range(8):
            if not number & bit:
                edges.append(corners[[number, number | bit]])
    return np.array(edges)


def inside(points: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which points lie in the box between two corners. (P, 3) -> (P,) bool"""
    low = np.minimum(one, other)
    high = np.maximum(one, other)
    return np.all((points >= low) & (points <= high), axis=1)
