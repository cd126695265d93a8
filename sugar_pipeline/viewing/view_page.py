# SPDX-License-Identifier: Apache-2.0
"""The page that shows results: what the browser draws, what our renderer draws, and switches."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import decode_view
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.training_views import at_scale
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from gaussian_splatting.viewing.page_server import (
    RenderQueue,
    add_frustum,
    follow_browsers,
    look_through,
    selected_option,
    show_picture,
)
from sugar_extractors.quality.mesh_report import jpeg_bytes
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, glb_chunks
from sugar_pipeline.rendering.shown_models import (
    DEPTHS,
    SHOWS,
    Result,
    ShownModel,
    far_depth,
    shown,
)
from sugar_pipeline.viewing.tool_panels import BoxPanel, MeasurePanel, PathPanel, hit
from sugar_scene.geometry import covariances
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError

if TYPE_CHECKING:
    import viser

_LARGEST_TEXTURE = 8_192
_POINT_SHARE = 0.002
_FRUSTUM_SHARE = 0.03
_TYPICAL_SIZE = 0.05  # standard deviation that the middle one of a cloud's Gaussians is sent with
GLB_TURN = (0.0, 1.0, 0.0, 0.0)  # from glTF's axes back to those of a capture, as a quaternion


_NO_SHADOW = {"cast_shadow": False, "receive_shadow": False}


def add_result(server: viser.ViserServer, name: str, result: Result | bytes) -> Any:
    """Put a result into the scene."""
    if isinstance(result, bytes):
        return server.scene.add_glb(name, result, wxyz=GLB_TURN, **_NO_SHADOW)
    if isinstance(result, GaussianCloud):
        return _add_gaussians(server, name, result)
    if isinstance(result, TexturedMesh):
        return server.scene.add_glb(name, textured_glb(result), **_NO_SHADOW)
    return _add_mesh(server, name, result)


def _add_gaussians(server: viser.ViserServer, name: str, cloud: GaussianCloud) -> Any:
    values = splat_values(cloud)
    scale = values.pop("scale")
    return server.scene.add_gaussian_splats(name, scale=float(scale), **values)


def splat_values(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """A cloud as the browser draws it, without view-dependent colour: arguments of viser by name.

    Covariances travel in half precision, which knows neither very small nor very large numbers.
    So they are in units in which typical Gaussians are of a middle size; ``scale`` says which.
    """
    gaussians = cloud.activate()
    middle = float(gaussians.scales.max(dim=1).values.median()) if len(cloud) else 1.0
    scale = max(middle, 1e-12) / _TYPICAL_SIZE
    colors = sh_to_rgb(gaussians.sh_dc[:, 0]).clamp(0, 1)
    return {
        "centers": (gaussians.means / scale).numpy(),
        "covariances": covariances(gaussians.quats, gaussians.scales / scale).numpy(),
        "rgbs": colors.numpy(),
        "opacities": gaussians.opacities[:, None].numpy(),
        "scale": np.float64(scale),
    }


def textured_glb(mesh: TexturedMesh) -> bytes:
    """A textured mesh as one GLB file in the axes of the capture."""
    side = max(mesh.texture.shape[:2])
    # What browsers take at most; the file on the disk keeps all of it.
    stride = -(-side // _LARGEST_TEXTURE)
    picture = jpeg_bytes(mesh.texture[::stride, ::stride])
    return b"".join(glb_chunks(mesh, picture, Path("mesh"), y_up=True))


def _add_mesh(server: viser.ViserServer, name: str, mesh: TriangleMesh) -> Any:
    # It comes with viser, whose absence is told elsewhere.
    import trimesh

    shape = trimesh.Trimesh(
        mesh.vertices, mesh.faces, vertex_colors=mesh.colors, process=False, validate=False
    )
    return server.scene.add_mesh_trimesh(name, shape, **_NO_SHADOW)


def add_points(
    server: viser.ViserServer, name: str, points: np.ndarray, colors: np.ndarray, extent: float
) -> Any:
    """The points of a reconstruction. points: (P, 3); colors: (P, 3) uint8"""
    return server.scene.add_point_cloud(
        name, points, colors, point_size=_POINT_SHARE * extent, point_shape="circle",
        precision="float32", point_shading="flat",
    )  # fmt: skip


def add_cameras(
    server: viser.ViserServer, name: str, cameras: Sequence[Camera], extent: float
) -> list[Any]:
    """The cameras of a capture as pyramids, still without their photographs."""
    size = _FRUSTUM_SHARE * extent
    return [
        add_frustum(server, f"{name}/{number}", camera, size)
        for number, camera in enumerate(cameras)
    ]


PHOTOGRAPH, ERROR = "photograph", "error"
PICTURES = (*SHOWS, PHOTOGRAPH, ERROR)
LAYOUTS = ("one", "side by side", "slider")
LARGEST_ERROR = 0.25  # mean difference of the colours, of 1, that is drawn white
_PAPER = 24
_LINE = 255
_KEPT_PHOTOGRAPHS = 8


@dataclass(frozen=True)
class Shown:
    """One picture."""

    model: str
    picture: str = SHOWS[0]


@dataclass(frozen=True)
class Arrangement:
    """What the page shows of our own renderer."""

    left: Shown
    right: Shown
    layout: str = LAYOUTS[0]
    split: float = 0.5

    @property
    def pictures(self) -> tuple[Shown, ...]:
        """What has to be rendered."""
        return (self.left,) if self.layout == "one" else (self.left, self.right)

    @property
    def of_photographs(self) -> bool:
        """Whether it is looked at from where a photograph was taken."""
        return any(shown.picture in (PHOTOGRAPH, ERROR) for shown in self.pictures)


class OwnPictures:
    """Renders what is arranged."""

    def __init__(
        self, models: dict[str, ShownModel], cameras: Sequence[Camera], white: bool
    ) -> None:
        self._models, self._cameras, self._white = models, list(cameras), white
        self._far: dict[str, float] = {}
        self._photograph = lru_cache(maxsize=_KEPT_PHOTOGRAPHS)(self._decode)

    @property
    def titles(self) -> tuple[str, ...]:
        """What can be rendered."""
        return tuple(self._models)

    def available(self, title: str) -> tuple[str, ...]:
        """Those of ``PICTURES`` that a model has."""
        clay = self._models[title].mesh is not None
        photographs = bool(self._cameras)
        return tuple(
            name
            for name in PICTURES
            if (clay or name != "clay") and (photographs or name not in (PHOTOGRAPH, ERROR))
        )

    def make(self, arranged: Arrangement, view: Camera) -> tuple[np.ndarray, str]:
        """The picture for a browser, (H, W, 3) uint8, and the photograph that it is taken from."""
        size = view.width, view.height
        name = ""
        if arranged.of_photographs:
            nearest = nearest_camera(self._cameras, view)
            name, view = nearest.name, nearest
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
        model = self._models[one.model]
        if one.picture == PHOTOGRAPH:
            dark = np.full((camera.height, camera.width, 3), _PAPER, np.uint8)
            return self._with_photograph(camera, dark)
        if one.picture == ERROR:
            image = shown(model, "image", camera, 1.0)
            # Beside the photograph there is nothing to differ from.
            return error_picture(image, self._with_photograph(camera, image))
        far = self._far_of(one.model, camera) if one.picture in DEPTHS else 1.0
        return fitted(shown(model, one.picture, camera, far), camera.width, camera.height)

    def _far_of(self, title: str, camera: Camera) -> float:
        """One depth for all views, or they would flicker."""
        if title not in self._far:
            probes = [small(one) for one in self._cameras[:: max(1, len(self._cameras) // 4)]]
            self._far[title] = far_depth(self._models[title], probes or [small(camera)])
        return self._far[title]

    def _with_photograph(self, camera: Camera, paper: np.ndarray) -> np.ndarray:
        """A picture with the photograph that was taken from its place on it. (H, W, 3) uint8"""
        source = next(one for one in self._cameras if one.name == camera.name)
        scale = camera.fx / source.fx
        width, height = max(1, round(source.width * scale)), max(1, round(source.height * scale))
        photograph = self._photograph(camera.name, width, height)
        left, top = round(camera.cx - source.cx * scale), round(camera.cy - source.cy * scale)
        return pasted(photograph, paper, left, top)

    def _decode(self, name: str, width: int, height: int) -> np.ndarray:
        source = next(one for one in self._cameras if one.name == name)
        return decode_view(source.resized(width, height), self._white)[..., :3]


def nearest_camera(cameras: Sequence[Camera], view: Camera) -> Camera:
    """The camera that sees most nearly what a view sees: by distance in extents, and by angle."""
    centers = np.stack([camera.center for camera in cameras])
    away = np.linalg.norm(centers - view.center, axis=1)
    spread = max(np.linalg.norm(centers - centers.mean(axis=0), axis=1).max(), 1e-9)
    ahead = np.stack([camera.rotation[2] for camera in cameras])
    turned = 1 - ahead @ view.rotation[2]
    return cameras[int(np.argmin(away / spread + turned))]


def cut_to(camera: Camera, width: int, height: int, whole: tuple[int, int]) -> Camera:
    """The middle of a view that fits into a picture, as a view of a part of that picture."""
    scale = min(whole[0] / camera.width, whole[1] / camera.height)
    sx = (width - camera.width * scale) / 2
    sy = (height - camera.height * scale) / 2
    return replace(
        camera, width=width, height=height, fx=camera.fx * scale, fy=camera.fy * scale,
        cx=camera.cx * scale + sx, cy=camera.cy * scale + sy,
    )  # fmt: skip


def small(camera: Camera, longest_side: int = 160) -> Camera:
    """A view with few pixels."""
    return at_scale(camera, min(1.0, longest_side / max(camera.width, camera.height)))


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


def fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """A picture in a size that it nearly has: renderers round sides to whole blocks."""
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height)))


def pasted(picture: np.ndarray, paper: np.ndarray, left: int, top: int) -> np.ndarray:
    """A picture on another one, cut off where it does not fit. (H, W, 3) uint8"""
    image = Image.fromarray(paper)
    image.paste(Image.fromarray(picture), (left, top))
    return np.asarray(image)


if TYPE_CHECKING:
    import viser

_IDLE_SECONDS = 0.1


@dataclass(frozen=True)
class Layer:
    """A result on the page."""

    title: str
    result: Result | bytes
    model: ShownModel | None  # what our renderer draws; None of a GLB file
    points: np.ndarray  # that say where it is, (P, 3) world units
    # The same, cut to a box of two corners; None where nothing of it is in there.
    cut: Callable[[np.ndarray, np.ndarray], Layer | None]


@dataclass(frozen=True)
class SceneContext:
    """Where the results stand."""

    scene: Scene | None  # the capture; None where it is unknown
    extent: float  # size of all, in world units
    box: tuple[np.ndarray, np.ndarray]  # corners of a first box, (3,) each
    metres_per_unit: float | None  # none where the scale is unknown
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
        """Put the next photograph into its frustum, once a browser is connected."""
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
    """What our own renderer is to show: ``arrangement``, None while the browser draws."""

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
