# SPDX-License-Identifier: Apache-2.0
"""The page that shows results: what the browser draws, what our renderer draws, and switches."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import decode_view
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from sugar_extractors.texture.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    glb_chunks,
    jpeg_bytes,
)
from sugar_scene.geometry import covariances
from sugar_utils.errors import Notify, UserError
from sugar_viewer import page_server
from sugar_viewer.render_run import SHOWS, Result, ShownModel, far_depth, shown
from sugar_viewer.tool_panels import BoxPanel, MeasurePanel, PathPanel, hit

if TYPE_CHECKING:
    import viser

_LARGEST_TEXTURE = 8_192
_POINT_SHARE = 0.002
_FRUSTUM_SHARE = 0.03
_TYPICAL_SIZE = 0.05  # standard deviation that the middle one of a cloud's Gaussians is sent with
GLB_TURN = (0.0, 1.0, 0.0, 0.0)  # from glTF's axes back to those of a capture, as a quaternion
_NO_SHADOW = {"cast_shadow": False, "receive_shadow": False}

LAYOUTS = ("one", "side by side", "slider")
LARGEST_ERROR = 0.25  # mean difference of the colours, of 1, that is drawn white
_PAPER = 24
SMALL_SIDE = 160  # pixels, of photographs in frusta
_LINE = 255


@dataclass(frozen=True)
class GlbFile:
    """A GLB file, which the browser alone can draw."""

    content: bytes
    upright: bool  # whether the page shows a world whose y is up, as that of the file is


def add_result(server: viser.ViserServer, name: str, result: Result | GlbFile) -> Any:
    """Show a result under a name of viser's scene."""
    if isinstance(result, GlbFile):
        turn = (1.0, 0.0, 0.0, 0.0) if result.upright else GLB_TURN
        return server.scene.add_glb(name, result.content, wxyz=turn, **_NO_SHADOW)
    if isinstance(result, GaussianCloud):
        return server.scene.add_gaussian_splats(name, **splat_values(result))
    if isinstance(result, TexturedMesh):
        return server.scene.add_glb(name, textured_glb(result), **_NO_SHADOW)
    # It comes with viser, whose absence is told elsewhere.
    import trimesh

    shape = trimesh.Trimesh(
        result.vertices, result.faces, vertex_colors=result.colors, process=False, validate=False
    )
    return server.scene.add_mesh_trimesh(name, shape, **_NO_SHADOW)


def splat_values(cloud: GaussianCloud) -> dict[str, Any]:
    """A cloud as the browser draws it, without view-dependent colour: arguments of viser by name.

    Covariances travel in half precision, which knows neither very small nor very large numbers.
    So they are in units in which typical Gaussians are of a middle size; ``scale`` says which.
    """
    gaussians = cloud.activate()
    middle = float(gaussians.scales.max(dim=1).values.median()) if len(cloud) else 1.0
    scale = max(middle, 1e-12) / _TYPICAL_SIZE
    return {
        "centers": (gaussians.means / scale).numpy(),
        "covariances": covariances(gaussians.quats, gaussians.scales / scale).numpy(),
        "rgbs": sh_to_rgb(gaussians.sh_dc[:, 0]).clamp(0, 1).numpy(),
        "opacities": gaussians.opacities[:, None].numpy(),
        "scale": scale,
    }


def textured_glb(mesh: TexturedMesh) -> bytes:
    """A textured mesh as one GLB file in the axes of the capture."""
    side = max(mesh.texture.shape[:2])
    # What browsers take at most; the file on the disk keeps all of it.
    stride = -(-side // _LARGEST_TEXTURE)
    picture = jpeg_bytes(mesh.texture[::stride, ::stride])
    return b"".join(glb_chunks(mesh, picture, Path("mesh"), MeshStyle(y_up=True)))


PHOTOGRAPH = "photograph"
ERROR = "error"
PICTURES = (*SHOWS, PHOTOGRAPH, ERROR)


@dataclass(frozen=True)
class Shown:
    model: str
    picture: str = SHOWS[0]


@dataclass(frozen=True)
class Arrangement:
    left: Shown
    right: Shown
    layout: str = LAYOUTS[0]
    split: float = 0.5

    @property
    def pictures(self) -> tuple[Shown, ...]:
        return (self.left,) if self.layout == "one" else (self.left, self.right)


class OwnPictures:
    def __init__(
        self, models: dict[str, ShownModel], cameras: Sequence[Camera], white: bool
    ) -> None:
        self.models = models
        self._white = white
        self._cameras = {camera.name: camera for camera in cameras}
        self._far: dict[str, float] = {}
        self._photograph = lru_cache(maxsize=8)(self._decode)

    def available(self, title: str) -> tuple[str, ...]:
        missing = set() if self._cameras else {PHOTOGRAPH, ERROR}
        if self.models[title].mesh is None:
            missing.add("clay")
        return tuple(name for name in PICTURES if name not in missing)

    def make(self, arranged: Arrangement, view: Camera) -> tuple[np.ndarray, str]:
        """The picture for a browser, (H, W, 3) uint8, and the photograph that it is taken from."""
        size = (view.width, view.height)
        name = ""
        if any(one.picture in (PHOTOGRAPH, ERROR) for one in arranged.pictures):
            view = nearest_camera(list(self._cameras.values()), view)
            name = view.name
        if arranged.layout == "side by side":
            halves = size[0] // 2, size[0] - size[0] // 2
            parts = [
                self._picture(one, cut_to(view, width, size[1], size))
                for one, width in zip(arranged.pictures, halves, strict=True)
            ]
            return np.concatenate(parts, axis=1), name
        whole = cut_to(view, *size, size)
        left, *others = [self._picture(one, whole) for one in arranged.pictures]
        return (slid(left, others[0], arranged.split) if others else left), name

    def _picture(self, one: Shown, camera: Camera) -> np.ndarray:
        model = self.models[one.model]
        if one.picture == PHOTOGRAPH:
            dark = np.full((camera.height, camera.width, 3), _PAPER, np.uint8)
            return self._with_photograph(camera, dark)
        if one.picture == ERROR:
            image = shown(model, "image", camera, 1.0)
            # Beside the photograph there is nothing to differ from.
            return error_picture(image, self._with_photograph(camera, image))
        if one.picture == "depth" and one.model not in self._far:
            # One depth for all views, or they would flicker.
            cameras = list(self._cameras.values())
            probes = cameras[:: max(1, len(cameras) // 4)] or [camera]
            self._far[one.model] = far_depth(model, [probe.reduced(SMALL_SIDE) for probe in probes])
        picture = shown(model, one.picture, camera, self._far.get(one.model, 1.0))
        if picture.shape[:2] == (camera.height, camera.width):
            return picture
        # Renderers round sides to whole blocks.
        return np.asarray(Image.fromarray(picture).resize((camera.width, camera.height)))

    def _with_photograph(self, camera: Camera, paper: np.ndarray) -> np.ndarray:
        """A picture with the photograph that was taken from its place on it. (H, W, 3) uint8"""
        source = self._cameras[camera.name]
        scale = camera.fx / source.fx
        width = max(1, round(source.width * scale))
        height = max(1, round(source.height * scale))
        left = round(camera.cx - source.cx * scale)
        top = round(camera.cy - source.cy * scale)
        image = Image.fromarray(paper)
        photograph = self._photograph(camera.name, width, height)
        image.paste(Image.fromarray(photograph), (left, top))
        return np.asarray(image)

    def _decode(self, name: str, width: int, height: int) -> np.ndarray:
        return decode_view(self._cameras[name].resized(width, height), self._white)[..., :3]


def nearest_camera(cameras: Sequence[Camera], view: Camera) -> Camera:
    """The camera that sees most nearly what a view sees: by distance in extents, and by angle."""
    centers = np.stack([camera.center for camera in cameras])
    away = np.linalg.norm(centers - view.center, axis=1)
    spread = max(np.linalg.norm(centers - centers.mean(axis=0), axis=1).max(), 1e-9)
    turned = 1 - np.stack([camera.rotation[2] for camera in cameras]) @ view.rotation[2]
    return cameras[int(np.argmin(away / spread + turned))]


def cut_to(camera: Camera, width: int, height: int, whole: tuple[int, int]) -> Camera:
    """The middle of a view that fits into a picture, as a view of a part of that picture."""
    scale = min(whole[0] / camera.width, whole[1] / camera.height)
    sx = (width - camera.width * scale) / 2
    sy = (height - camera.height * scale) / 2
    return replace(
        camera,
        width=width,
        height=height,
        fx=camera.fx * scale,
        fy=camera.fy * scale,
        cx=camera.cx * scale + sx,
        cy=camera.cy * scale + sy,
    )


def slid(left: np.ndarray, right: np.ndarray, split: float) -> np.ndarray:
    """Two pictures in one, the first up to a share of the width, with a line between them."""
    column = round(split * left.shape[1])
    both = np.concatenate([left[:, :column], right[:, column:]], axis=1)
    both[:, max(0, column - 1) : column + 1] = _LINE
    return both


def error_picture(image: np.ndarray, photograph: np.ndarray) -> np.ndarray:
    """How far two pictures, (H, W, 3), differ: black is equal, then red, yellow and white. uint8"""
    difference = np.abs(image.astype(np.float32) - photograph).mean(axis=2) / 255
    ramp = 3 * difference[..., None] / LARGEST_ERROR - np.arange(3, dtype=np.float32)
    return (255 * ramp.clip(0, 1)).round().astype(np.uint8)


@dataclass(frozen=True)
class Layer:
    title: str
    result: Result | GlbFile
    model: ShownModel | None  # what our renderer draws; None of a GLB file
    points: np.ndarray  # that say where it is, (P, 3) world units
    # The same, cut to a box of two corners; None where nothing of it is in there.
    cut: Callable[[np.ndarray, np.ndarray], Layer | None]


@dataclass(frozen=True)
class SceneContext:
    scene: Scene | None  # the capture; None where it is unknown
    extent: float  # size of all, in world units
    box: tuple[np.ndarray, np.ndarray]  # corners of a first box, (3,) each
    metres_per_unit: float | None  # none where the scale is unknown
    white: bool
    path_file: Path
    picture_size: int


class ViewPage:
    def __init__(
        self,
        server: viser.ViserServer,
        layers: Sequence[Layer],
        around: SceneContext,
        notify: Notify,
    ) -> None:
        self._server = server
        self._around = around
        self._notify = notify
        self._layers = {one.title: one for one in layers}
        self._whole = dict(self._layers)
        self.requests = page_server.RenderQueue(around.picture_size)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        scene = around.scene
        self._cameras = [] if scene is None else [*scene.train_cameras, *scene.test_cameras]
        self._photographed = [one for one in self._cameras if one.image_path is not None]
        self._pending = list(range(len(self._cameras)))
        self._nodes: dict[str, Any] = {}
        self._show_layers()
        self._switches = self._add_switches()
        self._own = OwnPanel(server, self._rendered, self._photographed, self._changed)
        self._box = BoxPanel(server, around.box, lambda: self.post(self._cut))
        self._measure = MeasurePanel(
            server, self._hit, self.post, around.metres_per_unit, 0.006 * around.extent
        )
        PathPanel(server, around.path_file)
        self._changed()
        page_server.follow_browsers(server, self.requests)

    def _show_layers(self) -> None:
        for number, (title, one) in enumerate(self._layers.items()):
            self._nodes[title] = add_result(self._server, f"/results/{number}", one.result)
        models = {title: one.model for title, one in self._layers.items() if one.model}
        self._rendered = OwnPictures(models, self._photographed, self._around.white)

    def post(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        self.requests.wake()

    def work(self) -> None:
        """Do what is due: what was clicked on, a picture, a photograph in its frustum; or wait."""
        try:
            self._tasks.get_nowait()()
        except queue.Empty:
            if not (self._show_picture() or self._show_photograph()):
                self.requests.wait(0.1)

    def _show_picture(self) -> bool:
        request = self.requests.due() if self._own.arrangement is not None else None
        if request is None:
            return False
        begun = time.monotonic()
        picture, name = self._rendered.make(self._own.arrangement, request.camera)
        page_server.show_picture(self._server, request.client, picture)
        self._own.tell(name)
        self.requests.made(request, time.monotonic() - begun)
        return True

    def _show_photograph(self) -> bool:
        """Put the next photograph into its frustum, once a browser is connected."""
        shown = bool(self._frusta) and self._switches["cameras"].value
        if not (self._pending and len(self.requests) and shown):
            return False
        number = self._pending.pop(0)
        camera = self._cameras[number]
        if camera.image_path is not None:
            try:
                self._frusta[number].image = decode_view(
                    camera.reduced(SMALL_SIDE), self._around.white
                )[..., :3]
            except UserError as error:
                self._notify(str(error))
        return True

    def _add_switches(self) -> dict[str, Any]:
        server = self._server
        around = self._around
        switches: dict[str, Any] = {}
        last = list(self._layers)[-1]
        self._points = None
        with server.gui.add_folder("Drawn by the browser (fast)"):
            for title in self._layers:
                switches[title] = server.gui.add_checkbox(title, title == last)
            self._frusta = [
                page_server.add_frustum(
                    server, f"/cameras/{number}", camera, _FRUSTUM_SHARE * around.extent
                )
                for number, camera in enumerate(self._cameras)
            ]
            for frustum, camera in zip(self._frusta, self._cameras, strict=True):
                frustum.on_click(
                    lambda event, camera=camera: page_server.look_through(event.client, camera)
                )
            scene = around.scene
            if scene is not None and len(scene.points):
                self._points = server.scene.add_point_cloud(
                    "/points",
                    scene.points,
                    scene.points_rgb,
                    precision="float32",
                    point_size=_POINT_SHARE * around.extent,
                    point_shape="circle",
                    point_shading="flat",
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
                page_server.show_picture(self._server, client, None)
        self.requests.renew()

    def _cut(self) -> None:
        """Show what is inside of the box, or all of it again."""
        cut = {}
        if self._box.cuts:
            cut = {title: whole.cut(*self._box.corners) for title, whole in self._whole.items()}
        self._layers = {title: cut.get(title) or whole for title, whole in self._whole.items()}
        self._show_layers()
        self._box.tell([title for title, one in cut.items() if one is None])
        self._changed()

    def _hit(self, origin: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        titles = [title for title in self._nodes if self._switches[title].value]
        if self._own.arrangement is not None:
            titles = [one.model for one in self._own.arrangement.pictures]
        models = [self._layers[title].model for title in titles]
        points = [hit(model, origin, direction) for model in models if model is not None]
        found = [point for point in points if point is not None]
        return min(found, key=lambda point: np.linalg.norm(point - origin), default=None)


class OwnPanel:
    """What our own renderer is to show: ``arrangement``, None while the browser draws."""

    def __init__(
        self,
        server: viser.ViserServer,
        pictures: OwnPictures,
        cameras: Sequence[Camera],
        changed: Callable[[], None],
    ) -> None:
        self.arrangement: Arrangement | None = None
        self._changed = changed
        self._pictures = pictures
        titles = tuple(pictures.models)
        if not titles:
            return
        gui = server.gui
        kinds = PICTURES if cameras else PICTURES[:-2]
        with gui.add_folder("Rendered by SuGaR (exact)"):
            self._on = gui.add_checkbox(
                "On",
                False,
                hint="as the results are measured: view-dependent colours, depth, errors",
            )
            self._layout = gui.add_dropdown("Layout", LAYOUTS)
            self._left = gui.add_dropdown("Result", titles, initial_value=titles[-1])
            self._left_kind = gui.add_dropdown("Picture", kinds)
            self._right = gui.add_dropdown("Beside it", titles, initial_value=titles[0])
            self._right_kind = gui.add_dropdown("Picture ", kinds)
            self._split = gui.add_slider("Slider", 0.0, 1.0, 0.01, 0.5)
            self._words = gui.add_markdown("")
        for control in (
            self._on,
            self._layout,
            self._left,
            self._left_kind,
            self._right,
            self._right_kind,
            self._split,
        ):
            control.on_update(lambda _: self._read())
        self._read(silent=True)

    def tell(self, photograph: str) -> None:
        """Name the photograph that a picture is taken from."""
        text = f"from the place of `{photograph}`" if photograph else ""
        if self._words.content != text:
            self._words.content = text

    def _read(self, silent: bool = False) -> None:
        layout = page_server.selected_option(self._layout)
        split = self._split.value
        for control in (self._right, self._right_kind):
            control.visible = layout != LAYOUTS[0]
        self._split.visible = layout == LAYOUTS[2]
        sides = (self._left, self._left_kind), (self._right, self._right_kind)
        shown = [self._shown(*side) for side in sides]
        split = split if 0 <= split <= 1 else 0.5
        self.arrangement = Arrangement(*shown, layout, split) if self._on.value else None
        if not silent:
            self._changed()

    def _shown(self, title: Any, kind: Any) -> Shown:
        """What was chosen; Gaussians have no clay, their colours are shown."""
        one = Shown(page_server.selected_option(title), page_server.selected_option(kind))
        possible = self._pictures.available(one.model)
        return one if one.picture in possible else replace(one, picture=possible[0])
