# SPDX-License-Identifier: Apache-2.0
"""Read results and their capture, and serve the page that shows them."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gaussian_splatting.engine.observer import DEFAULT_PORT, LOCALHOST, port_number
from gaussian_splatting.formats.placement import UP, Placement
from gaussian_splatting.rasterization.compute import Compute, DeviceFlags
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.placing import PlacementOptions, scale_of
from sugar_extractors.results import capture_of, scene_of
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, made_of, without_flags
from sugar_viewer import page_server as pages
from sugar_viewer.first_view import AXES_WITHOUT_CAMERAS, first_view
from sugar_viewer.placed_results import common_placement, moved_scene, scene_of_folder
from sugar_viewer.result_search import find_results
from sugar_viewer.tool_panels import box_around
from sugar_viewer.view_layers import read_layer
from sugar_viewer.view_page import Layer, SceneContext, ViewPage

_UPRIGHT_AXES = np.eye(3)  # rows: to the right, up, and towards the viewer
_flag = partial(flag, group="viewer")


@dataclass(frozen=True)
class ViewOptions:
    """Flags of ``sugar view``."""

    results: tuple[Path, ...] = _flag(
        MISSING,
        "what to show: an output folder, the folder of a run, Gaussians (.ply, .pt, .spz, "
        ".splat), meshes (.ply, .obj, .glb)",
        positional=True,
        parse=Path,
        nargs="+",
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras, photographs and points; unset: the one that the "
        "results' own records name, or the cameras in the folder of results",
        short="-s",
        parse=Path,
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: those of the records, or of the scene",
        short="-c",
        parse=Path,
    )
    port: int = _flag(DEFAULT_PORT, "port of this machine to serve the page on", parse=port_number)
    host: str = _flag(LOCALHOST, "address to serve it on; 0.0.0.0 lets other machines look")
    no_open: bool = _flag(False, "do not open the page in the browser", action="store_true")
    picture_size: int = _flag(
        1280,
        "longest side of SuGaR's exact pictures, in pixels, while nothing moves",
        parse=positive_int,
    )
    path_file: Path = _flag(
        OUTPUT_ROOT / "camera_path.json",
        "file for the camera path that is saved on the page, for sugar render --path",
        parse=Path,
    )
    scale_factor: float | None = _flag(
        None, "metres per unit of the capture, for measuring", parse=positive_float
    )
    known_distance: tuple[str, ...] | None = _flag(
        None,
        "two photographs or two points x,y,z of the capture, and how many metres lie between "
        "the cameras or points, for measuring",
        parse=str,
        nargs=3,
        metavar=("A", "B", "METRES"),
        no_effect_when="with --scale_factor it is an error",
    )
    white_background: bool = white_background()
    compute: Compute = made_of(DeviceFlags, Compute)
    placement: PlacementOptions = without_flags(PlacementOptions)

    def __post_init__(self) -> None:
        scale = PlacementOptions("none", self.scale_factor, self.known_distance)
        object.__setattr__(self, "placement", scale)


def view(
    options: ViewOptions, console: Console | None = None, until: Callable[[], bool] = lambda: False
) -> None:
    """Serve the page of some results.

    Args:
        until: Called between tasks of the page; True ends it.
    """
    console = console or Console()
    pages.load_viser()
    pages.check_free(options.host, options.port, "--port")
    options.compute.report(console.info)
    results = find_results(options.results, console.info)
    paths = [result.path for result in results]
    placement = common_placement(paths)
    upright = placement.up == UP
    scene = _capture(paths, options, console)
    layers = []
    for result in results:
        console.info(f"{result.title}: {result.path}")
        device = options.compute.device
        layer = read_layer(result, options.white_background, device, upright, console.info)
        layers.append(layer)
    metres = metres_per_unit(placement, scene, options)
    if scene is not None and placement.is_recorded:
        scene = moved_scene(scene, np.linalg.inv(placement.to_scene(scene.offset)))
    context = scene_context(layers, scene, metres, options)
    address = pages.address(options.host, options.port)
    with pages.closing(pages.open_server(options.host, options.port, "SuGaR")) as server:
        start = first_view(layers, scene, _UPRIGHT_AXES if upright else AXES_WITHOUT_CAMERAS)
        pages.stand_at(server, start.camera, start.up, start.distance)
        page = ViewPage(server, layers, context, console.warn)
        console.info(f"viewer: {address} (Ctrl-C ends it)")
        if not options.no_open:
            webbrowser.open(address)
        while not until():
            page.work()


def _capture(paths: Sequence[Path], options: ViewOptions, console: Console) -> Scene | None:
    """Return the capture of the results, or else their cameras; None if these are unknown."""
    capture = capture_of(paths, options.scene_path, options.checkpoint_path)
    if options.scene_path is not None:
        return scene_of(capture, SugarSize(), console.info)
    if capture.scene is not None:
        console.info(f"the capture, by the records of the runs: {capture.scene}")
        try:
            return scene_of(capture, SugarSize(), console.info)
        except UserError as error:
            console.warn(f"the capture is not shown: {error}")
    scene = scene_of_folder(paths, SugarSize())
    if scene is None:
        console.info("no capture is known, so there are no cameras; name its folder with -s")
    else:
        console.info(scene.description)
    return scene


def metres_per_unit(
    placement: Placement, scene: Scene | None, options: ViewOptions
) -> float | None:
    """Return how many metres a unit of the results is; None where that is unknown.

    What the user gives is about the capture, of which the results may have another size.
    """
    if not options.placement.is_scaled:
        return 1.0 if placement.is_metric else None
    cameras = [] if scene is None else scene.cameras
    if not cameras and options.placement.needs_cameras:
        raise UserError("photographs of --known_distance need a capture; name its folder with -s")
    world_offset = None if scene is None else scene.offset
    return scale_of(cameras, options.placement, world_offset) / placement.scale


def scene_context(
    layers: Sequence[Layer],
    scene: Scene | None,
    metres_per_unit: float | None,
    options: ViewOptions,
) -> SceneContext:
    """Return the size, the scale and the first box of the shown results."""
    low, high = box_around(layers[-1].points)
    extent = float(np.linalg.norm(high - low))
    if scene is not None and scene.extent > 0:
        extent = scene.extent
    return SceneContext(
        scene=scene,
        extent=extent,
        box=(low, high),
        metres_per_unit=metres_per_unit,
        white=options.white_background,
        path_file=options.path_file,
        picture_size=options.picture_size,
    )
