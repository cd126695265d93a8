# SPDX-License-Identifier: Apache-2.0
"""The page that shows results: what the browser draws, what our renderer draws, and switches."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import decode_view
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.viewing.page_server import (
    RenderQueue,
    follow_browsers,
    look_through,
    selected_option,
    show_picture,
)
from sugar_pipeline.filming.shown_models import Result, ShownModel
from sugar_pipeline.viewing.scene_nodes import (
    LAYOUTS,
    PICTURES,
    Arrangement,
    OwnPictures,
    Shown,
    add_cameras,
    add_points,
    add_result,
    small,
)
from sugar_pipeline.viewing.tool_panels import BoxPanel, MeasurePanel, PathPanel, hit
from sugar_utils.errors import UserError

if TYPE_CHECKING:
    import viser

_IDLE_SECONDS = 0.1


@dataclass(frozen=True)
class Layer:
    """A result on the page.

    Attributes:
        model: What our renderer draws; None of a GLB file.
        points: That say where it is. (P, 3) world units
        cut: The same, cut to a box of two corners; None where nothing of it is in there.
    """

    title: str
    result: Result | bytes
    model: ShownModel | None
    points: np.ndarray
    cut: Callable[[np.ndarray, np.ndarray], Layer | None]


@dataclass(frozen=True)
class SceneContext:
    """Where the results stand.

    Attributes:
        scene: The capture; None where it is unknown.
        extent: Size of all, in world units.
        box: Corners of a first box. (3,) each
        metres_per_unit: None where the scale is unknown.
    """

    scene: Scene | None
    extent: float
    box: tuple[np.ndarray, np.ndarray]
    metres_per_unit: float | None
    white: bool
    path_file: Path
    picture_size: int


class ViewPage:
    """The page; all rendering is done by who calls :meth:`work`."""

    def __init__(
        self,
        server: viser.ViserServer,
        layers: Sequence[Layer],
        around: SceneContext,
        notify: Callable[[str], None],
    ) -> None:
        self._server, self._around, self._notify = server, around, notify
        self._layers = {one.title: one for one in layers}
        self._whole = dict(self._layers)
        self.requests = RenderQueue(around.picture_size)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        scene = around.scene
        self._cameras = [] if scene is None else [*scene.train_cameras, *scene.test_cameras]
        self._photographed = [one for one in self._cameras if one.image_path is not None]
        self._pending = list(range(len(self._cameras)))
        self._nodes = {
            title: add_result(server, f"/results/{number}", one.result)
            for number, (title, one) in enumerate(self._layers.items())
        }
        self._rendered = self._pictures()
        self._switches = self._add_switches()
        self._own = OwnPanel(server, self._rendered, self._photographed, self._changed)
        self._box = BoxPanel(server, around.box, lambda: self.post(self._cut))
        self._measure = MeasurePanel(
            server, self._hit, self.post, around.metres_per_unit, 0.006 * around.extent
        )
        PathPanel(server, around.path_file)
        self._changed()
        follow_browsers(server, self.requests)

    def post(self, task: Callable[[], None]) -> None:
        """Have something done by the thread that renders."""
        self._tasks.put(task)
        self.requests.wake()

    def work(self) -> None:
        """Do what is due: what was clicked on, a picture, a photograph in its frustum; or wait."""
        try:
            task = self._tasks.get_nowait()
        except queue.Empty:
            task = None
        if task is not None:
            task()
        elif not (self._show_picture() or self._show_photograph()):
            self.requests.wait(_IDLE_SECONDS)

    def _show_picture(self) -> bool:
        request = self.requests.due() if self._own.arrangement is not None else None
        if request is None:
            return False
        begun = time.monotonic()
        picture, name = self._rendered.make(self._own.arrangement, request.camera)
        show_picture(self._server, request.client, picture)
        self._own.tell(name)
        self.requests.made(request, time.monotonic() - begun)
        return True

    def _show_photograph(self) -> bool:
        """Put the next photograph into its frustum, once somebody looks."""
        if not (self._pending and len(self.requests) and self._cameras_shown()):
            return False
        number = self._pending.pop(0)
        camera = self._cameras[number]
        if camera.image_path is not None:
            try:
                self._frusta[number].image = decode_view(small(camera), self._around.white)[..., :3]
            except UserError as error:
                self._notify(str(error))
        return True

    def _cameras_shown(self) -> bool:
        return bool(self._frusta) and self._switches["cameras"].value

    def _add_switches(self) -> dict[str, Any]:
        server, around = self._server, self._around
        switches: dict[str, Any] = {}
        last = list(self._layers)[-1]
        with server.gui.add_folder("Shown by the browser"):
            for title in self._layers:
                switches[title] = server.gui.add_checkbox(title, title == last)
            self._frusta = add_cameras(server, "/cameras", self._cameras, around.extent)
            for frustum, camera in zip(self._frusta, self._cameras, strict=True):
                frustum.on_click(partial(_go_to, camera))
            self._points = None
            if around.scene is not None and len(around.scene.points):
                self._points = add_points(
                    server, "/points", around.scene.points, around.scene.points_rgb, around.extent
                )
                switches["points"] = server.gui.add_checkbox("sparse points", False)
            if self._frusta:
                switches["cameras"] = server.gui.add_checkbox("cameras", False)
        for box in switches.values():
            box.on_update(lambda _: self._changed())
        return switches

    def _changed(self) -> None:
        """Show what the switches say; what our renderer draws stands alone."""
        own = self._own.arrangement is not None
        for title, node in self._nodes.items():
            node.visible = not own and self._switches[title].value
        if self._points is not None:
            self._points.visible = self._switches["points"].value
        for frustum in self._frusta:
            frustum.visible = self._switches["cameras"].value
        if not own:
            for client in self._server.get_clients():
                show_picture(self._server, client, None)
        self.requests.renew()

    def _pictures(self) -> OwnPictures:
        models = {title: one.model for title, one in self._layers.items() if one.model}
        return OwnPictures(models, self._photographed, self._around.white)

    def _cut(self) -> None:
        """Show what is inside of the box, or all of it again."""
        corners = self._box.corners if self._box.cuts else None
        outside = []
        for number, (title, whole) in enumerate(self._whole.items()):
            one = whole if corners is None else whole.cut(*corners)
            if one is None:
                outside.append(title)
                one = whole
            self._layers[title] = one
            self._nodes[title] = add_result(self._server, f"/results/{number}", one.result)
        self._rendered = self._pictures()
        self._box.tell(outside)
        self._changed()

    def _hit(self, origin: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """The nearest point of what is shown."""
        arranged = self._own.arrangement
        if arranged is not None:
            titles = [one.model for one in arranged.pictures]
        else:
            titles = [title for title in self._nodes if self._switches[title].value]
        models = [self._layers[title].model for title in titles]
        points = [hit(model, origin, direction) for model in models if model is not None]
        found = [point for point in points if point is not None]
        return min(found, key=lambda point: np.linalg.norm(point - origin), default=None)


def _go_to(camera: Camera, event: Any) -> None:
    """Look from a camera that was clicked on."""
    look_through(event.client, camera)


class OwnPanel:
    """What our own renderer is to show.

    Attributes:
        arrangement: What to show; None while the browser draws.
    """

    def __init__(
        self,
        server: viser.ViserServer,
        pictures: OwnPictures,
        cameras: Sequence[Camera],
        changed: Callable[[], None],
    ) -> None:
        self.arrangement: Arrangement | None = None
        self._changed, self._pictures = changed, pictures
        titles = pictures.titles
        if not titles:
            return
        gui = server.gui
        kinds = PICTURES if cameras else PICTURES[:-2]
        with gui.add_folder("Own renderer"):
            self._on = gui.add_checkbox("On", False, hint="view-dependent colours, depth, errors")
            self._layout = gui.add_dropdown("Layout", LAYOUTS)
            self._left = gui.add_dropdown("Result", titles, initial_value=titles[-1])
            self._left_kind = gui.add_dropdown("Picture", kinds)
            self._right = gui.add_dropdown("Beside it", titles, initial_value=titles[0])
            self._right_kind = gui.add_dropdown("Picture ", kinds)
            self._split = gui.add_slider("Slider", 0.0, 1.0, 0.01, 0.5)
            self._words = gui.add_markdown("")
        for control in (
            self._on, self._layout, self._left, self._left_kind, self._right, self._right_kind,
            self._split,
        ):  # fmt: skip
            control.on_update(lambda _: self._read())
        self._read(silent=True)

    def tell(self, photograph: str) -> None:
        """Name the photograph that a picture is taken from."""
        text = f"from the place of `{photograph}`" if photograph else ""
        if self._words.content != text:
            self._words.content = text

    def _read(self, silent: bool = False) -> None:
        layout, split = selected_option(self._layout), self._split.value
        several = layout != LAYOUTS[0]
        for control in (self._right, self._right_kind):
            control.visible = several
        self._split.visible = layout == LAYOUTS[2]
        self.arrangement = None
        if self._on.value:
            self.arrangement = Arrangement(
                self._shown(self._left, self._left_kind),
                self._shown(self._right, self._right_kind),
                layout,
                split if 0 <= split <= 1 else 0.5,
            )
        if not silent:
            self._changed()

    def _shown(self, title: Any, kind: Any) -> Shown:
        """What was chosen; Gaussians have no clay, their colours are shown."""
        one = Shown(selected_option(title), selected_option(kind))
        possible = self._pictures.available(one.model)
        return one if one.picture in possible else replace(one, picture=possible[0])
