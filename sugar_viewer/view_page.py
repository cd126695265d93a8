# SPDX-License-Identifier: Apache-2.0
"""The page that shows results: drawn by the browser or by the Warp renderer, with switches."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.data.images import decode_view
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.reading import Result
from sugar_scene.geometry import covariances
from sugar_scene.mesh_files.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    glb_chunks,
    jpeg_bytes,
)
from sugar_utils.errors import Notify, UserError
from sugar_viewer import page_server
from sugar_viewer.render_panel import RenderPanel
from sugar_viewer.rendered_pictures import RenderedPictures
from sugar_viewer.shown_models import ShownModel
from sugar_viewer.tool_panels import BoxPanel, MeasurePanel, PathPanel, hit

if TYPE_CHECKING:
    import viser

_LARGEST_TEXTURE = 8_192  # texels a side that browsers take
_POINT_SHARE = 0.002  # of the extent
_FRUSTUM_SHARE = 0.03  # of the extent
_MARK_SHARE = 0.006  # of the extent
_TYPICAL_SIZE = 0.05  # standard deviation that the middle one of a cloud's Gaussians is sent with
GLB_TURN = (0.0, 1.0, 0.0, 0.0)  # from glTF's axes back to those of a capture, as a quaternion
SMALL_SIDE = 160  # pixels, of images in frusta


@dataclass(frozen=True)
class GlbFile:
    """A GLB file, which the browser alone can draw."""

    content: bytes
    upright: bool  # whether the page shows a world whose y is up, as that of the file is


def add_result(
    server: viser.ViserServer, name: str, result: Result | GlbFile
) -> viser.SceneNodeHandle:
    """Show a result under a name of viser's scene."""
    if isinstance(result, GlbFile):
        turn = (1.0, 0.0, 0.0, 0.0) if result.upright else GLB_TURN
        return server.scene.add_glb(
            name, result.content, wxyz=turn, cast_shadow=False, receive_shadow=False
        )
    if isinstance(result, GaussianCloud):
        return server.scene.add_gaussian_splats(name, **splat_values(result))
    if isinstance(result, TexturedMesh):
        return server.scene.add_glb(
            name, textured_glb(result), cast_shadow=False, receive_shadow=False
        )
    # It comes with viser, which is checked elsewhere.
    import trimesh

    shape = trimesh.Trimesh(
        result.vertices, result.faces, vertex_colors=result.colors, process=False, validate=False
    )
    return server.scene.add_mesh_trimesh(name, shape, cast_shadow=False, receive_shadow=False)


def splat_values(cloud: GaussianCloud) -> dict[str, Any]:
    """Return a cloud as arguments of viser by name, without view-dependent colour.

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
    """Return a textured mesh as one GLB file in the axes of the capture."""
    side = max(mesh.texture.shape[:2])
    # The file on the disk keeps all texels.
    stride = math.ceil(side / _LARGEST_TEXTURE)
    picture = jpeg_bytes(mesh.texture[::stride, ::stride])
    return b"".join(glb_chunks(mesh, picture, Path("mesh"), MeshStyle(y_up=True)))


@dataclass(frozen=True)
class Layer:
    """A result on the page."""

    title: str
    result: Result | GlbFile
    model: ShownModel | None  # what the Warp renderer draws; None of a GLB file
    points: np.ndarray  # that say where it is, (P, 3) world units
    # Returns the layer cut to a box of two corners; None where nothing of it is in there.
    cut: Callable[[np.ndarray, np.ndarray], Layer | None]


@dataclass(frozen=True)
class SceneContext:
    """The capture, sizes and settings of the page besides the results."""

    scene: Scene | None  # the capture; None where it is unknown
    extent: float  # size of all, in world units
    box: tuple[np.ndarray, np.ndarray]  # corners of a first box, (3,) each
    metres_per_unit: float | None  # none where the scale is unknown
    white: bool  # whether the background is white, else black
    path_file: Path  # to which a camera path is saved
    picture_size: int  # longest side of rendered pictures, in pixels


class ViewPage:
    """The page of one server.

    Browsers' callbacks post tasks; :meth:`work`, called in a loop by one thread, does them and
    renders pictures and thumbnails in between.
    """

    def __init__(
        self,
        server: viser.ViserServer,
        layers: Sequence[Layer],
        context: SceneContext,
        notify: Notify,
    ) -> None:
        self._server = server
        self._context = context
        self._notify = notify
        self._uncut_layers = {layer.title: layer for layer in layers}
        self._layers = dict(self._uncut_layers)
        self.requests = page_server.RenderQueue(context.picture_size)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        scene = context.scene
        self._cameras = [] if scene is None else scene.cameras
        self._image_cameras = [camera for camera in self._cameras if camera.image_path is not None]
        self._pending = list(range(len(self._cameras)))
        self._nodes: dict[str, Any] = {}
        self._show_layers()
        self._switches = self._add_switches()
        self._render_panel = RenderPanel(server, self._rendered, self._image_cameras, self._changed)
        self._box = BoxPanel(server, context.box, lambda: self.post(self._cut))
        self._measure = MeasurePanel(
            server, self._hit, self.post, context.metres_per_unit, _MARK_SHARE * context.extent
        )
        PathPanel(server, context.path_file)
        self._changed()
        page_server.follow_browsers(server, self.requests)

    def _show_layers(self) -> None:
        """Give the layers to the browser and to the Warp renderer."""
        models = {}
        for number, (title, layer) in enumerate(self._layers.items()):
            self._nodes[title] = add_result(self._server, f"/results/{number}", layer.result)
            if layer.model is not None:
                models[title] = layer.model
        self._rendered = RenderedPictures(models, self._image_cameras, self._context.white)

    def post(self, task: Callable[[], None]) -> None:
        """Have a task done by the thread that calls :meth:`work`."""
        self._tasks.put(task)
        self.requests.wake()

    def work(self) -> None:
        """Do one task: a posted one, a picture, or a thumbnail in its frustum; else wait."""
        try:
            self._tasks.get_nowait()()
        except queue.Empty:
            if not (self._show_picture() or self._show_photograph()):
                self.requests.wait(0.1)

    def _show_picture(self) -> bool:
        """Render the next picture that a browser waits for; return whether there was one."""
        arrangement = self._render_panel.arrangement
        if arrangement is None:
            return False
        request = self.requests.due()
        if request is None:
            return False
        start = time.monotonic()
        picture = self._rendered.make(arrangement, request.camera)
        page_server.show_picture(self._server, request.client, picture.pixels)
        self._render_panel.tell(picture.photograph)
        self.requests.made(request, time.monotonic() - start)
        return True

    def _show_photograph(self) -> bool:
        """Put the next image into its frustum, once a browser is connected.

        Returns whether there was one.
        """
        has_browser = len(self.requests) > 0
        if not self._pending or not has_browser or not self._frusta:
            return False
        if not self._switches["cameras"].value:
            return False
        number = self._pending.pop(0)
        camera = self._cameras[number]
        if camera.image_path is not None:
            try:
                image = decode_view(camera.reduced(SMALL_SIDE), self._context.white)
                self._frusta[number].image = image[..., :3]
            except UserError as error:
                self._notify(str(error))
        return True

    def _add_switches(self) -> dict[str, Any]:
        """Add results, cameras and points that the browser draws, with a switch each."""
        server = self._server
        switches: dict[str, viser.GuiCheckboxHandle] = {}
        last = list(self._layers)[-1]
        with server.gui.add_folder("Drawn by the browser (fast)"):
            for title in self._layers:
                switches[title] = server.gui.add_checkbox(title, title == last)
            self._frusta = [self._add_frustum(number) for number in range(len(self._cameras))]
            self._points = self._add_points()
            if self._points is not None:
                switches["points"] = server.gui.add_checkbox("sparse points", False)
            if self._frusta:
                switches["cameras"] = server.gui.add_checkbox("cameras", False)
        for switch in switches.values():
            switch.on_update(lambda _: self._changed())
        return switches

    def _add_frustum(self, number: int) -> viser.CameraFrustumHandle:
        """Add the frustum of a camera; a click on it looks through the camera."""
        camera = self._cameras[number]
        size = _FRUSTUM_SHARE * self._context.extent
        frustum = page_server.add_frustum(self._server, f"/cameras/{number}", camera, size)
        frustum.on_click(lambda event: page_server.look_through(event.client, camera))
        return frustum

    def _add_points(self) -> viser.PointCloudHandle | None:
        """Add the points of the reconstruction; return None if there are none."""
        scene = self._context.scene
        if scene is None or not len(scene.points):
            return None
        return self._server.scene.add_point_cloud(
            "/points",
            scene.points,
            scene.points_rgb,
            precision="float32",
            point_size=_POINT_SHARE * self._context.extent,
            point_shape="circle",
            point_shading="flat",
        )

    def _changed(self) -> None:
        """Apply the switches; a rendered picture hides the results of the browser."""
        is_rendered = self._render_panel.arrangement is not None
        for title, node in self._nodes.items():
            node.visible = not is_rendered and self._switches[title].value
        if self._points is not None:
            self._points.visible = self._switches["points"].value
        for frustum in self._frusta:
            frustum.visible = self._switches["cameras"].value
        if not is_rendered:
            for client in self._server.get_clients():
                page_server.show_picture(self._server, client, None)
        self.requests.renew()

    def _cut(self) -> None:
        """Show the part inside the box, or everything again."""
        self._layers = dict(self._uncut_layers)
        outside = []
        if self._box.cuts:
            low, high = self._box.corners
            for title, layer in self._uncut_layers.items():
                part = layer.cut(low, high)
                if part is None:
                    outside.append(title)
                else:
                    self._layers[title] = part
        self._show_layers()
        self._box.tell(outside)
        self._changed()

    def _hit(self, origin: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """Return the first point of the visible results on a ray, (3,); None if there is none."""
        titles = [title for title in self._nodes if self._switches[title].value]
        arrangement = self._render_panel.arrangement
        if arrangement is not None:
            titles = [choice.model for choice in arrangement.pictures]
        points = []
        for title in titles:
            model = self._layers[title].model
            point = None if model is None else hit(model, origin, direction)
            if point is not None:
                points.append(point)
        return min(points, key=lambda point: np.linalg.norm(point - origin), default=None)
