# SPDX-License-Identifier: Apache-2.0
"""Results in the viewer: what is found, how it is drawn, and what its tools say."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import shutil
import socket
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera, front_direction, upright_axes
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.scenes.reference_layout import read_cameras_json, write_camera_list
from gaussian_splatting.scenes.scene import Scene, load_scene
from sugar_extractors.placing import PlacementOptions, placing_matrix
from sugar_extractors.results import Capture, capture_of
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_scene.geometry import covariances
from sugar_scene.mesh_files.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    write_textured_mesh,
)
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from sugar_viewer.camera_paths import between, looking
from sugar_viewer.first_view import first_view
from sugar_viewer.page_server import BrowserView, closing, look_through, open_server
from sugar_viewer.placed_results import common_placement, moved_scene
from sugar_viewer.rendered_pictures import RenderedPicture
from sugar_viewer.result_search import (
    COARSE,
    COARSE_MESH,
    REFINED,
    TEXTURED,
    VANILLA,
    find_results,
)
from sugar_viewer.shown_models import model_of, open_shown
from sugar_viewer.tool_panels import (
    box_around,
    box_edges,
    box_flags,
    distance_text,
    hit,
    inside,
    length_text,
)
from sugar_viewer.view_layers import cut_result, glb_points, layer_of
from sugar_viewer.view_page import ViewPage, splat_values, textured_glb
from sugar_viewer.view_run import (
    ViewOptions,
    metres_per_unit,
    scene_context,
)
from tests.support.command_line import free_port
from tests.support.command_words import parse
from tests.support.mesh_scenes import cameras_around, icosahedron, sphere
from tests.support.refined_models import NAME, refined_state, save_model
from tests.support.tiny_scene import (
    make_tiny_checkpoint,
    refusal,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.verbs import view
from tests.test_placed_export import scene_of

CPU = torch.device("cpu")
COARSE_RUN = "sugarcoarse_3Dgs7000_densityestim02_sdfnorm02"
COARSE_FILE = "sugarmesh_3Dgs7000_level03_decim20.ply"


def textured() -> TexturedMesh:
    shape = icosahedron()
    return TexturedMesh(
        torch.from_numpy(shape.vertices).float(),
        torch.from_numpy(shape.faces),
        torch.rand(20, 3, 2, generator=torch.Generator().manual_seed(0)),
        torch.full((8, 8, 3), 200, dtype=torch.uint8),
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory, scene):
    """A folder of results of all stages, with records that lead to the scene."""
    root = tmp_path_factory.mktemp("output")
    make_tiny_checkpoint(root / "vanilla_gs" / "scan", scene)
    for name in (COARSE_RUN, f"{COARSE_RUN}_older"):
        folder = root / "coarse" / "scan" / name
        folder.mkdir(parents=True)
        model = TrainableCloud(tiny_cloud(), LearningRates(), 1.0)
        rest = {"train_losses": [], "epoch": 0, "iteration": 15000}
        torch.save({**model.state(), **rest}, folder / "15000.pt")
    mesh = root / "coarse_mesh" / "scan" / COARSE_FILE
    mesh.parent.mkdir(parents=True)
    write_mesh_ply(mesh, icosahedron())
    sources = {"scene": str(scene.root), "checkpoint": str(root / "vanilla_gs" / "scan")}
    mesh.with_suffix(".json").write_text(json.dumps({"sources": sources}))
    refined = save_model(root / "refined" / "scan", refined_state())
    obj = root / "refined_mesh" / "scan" / f"{NAME}.obj"
    obj.parent.mkdir(parents=True)
    write_textured_mesh(obj, textured())
    ply = root / "refined_ply" / "scan" / f"{NAME}.ply"
    ply.parent.mkdir(parents=True)
    write_gaussian_ply(ply, tiny_cloud())
    return SimpleNamespace(root=root, mesh=mesh, refined=refined, obj=obj, ply=ply)


def test_of_an_output_folder_the_newest_result_of_each_stage_is_shown(output):
    told: list[str] = []
    found = find_results([output.root], told.append)
    assert [one.title for one in found] == [VANILLA, COARSE, COARSE_MESH, REFINED, TEXTURED]
    assert found[4].path == output.obj
    assert len(told) == 1
    assert "not shown, an older one" in told[0]


def test_files_and_folders_of_runs_are_shown_as_they_are_named(output):
    paths = [output.ply, output.obj.with_suffix(".glb"), output.obj, output.obj, output.mesh.parent]
    titles = [one.title for one in find_results(paths, print)]
    assert titles == [output.ply.name, f"{NAME}.glb", TEXTURED, f"{TEXTURED} (2)", COARSE_MESH]


def test_what_holds_nothing_to_see_is_refused(tmp_path, scene):
    (tmp_path / "notes.txt").write_text("x")
    for path, message in (
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path / "notes.txt", "cannot be shown; pass one of .ply"),
        (tmp_path, "holds no result of any stage"),
        (scene.root, "holds no result of any stage"),
    ):
        with pytest.raises(UserError, match=message):
            find_results([path], print)


def test_the_capture_is_that_of_the_records(output, scene, tmp_path):
    found = find_results([output.root], print)
    capture = capture_of([one.path for one in found])
    assert capture.scene == scene.root
    assert capture.checkpoint == output.root / "vanilla_gs" / "scan"
    alone = tmp_path / COARSE_FILE
    shutil.copy(output.mesh, alone)
    assert capture_of([alone]) == Capture()
    alone.with_suffix(".json").write_text('{"sources": {"scene": 7}}')
    with pytest.raises(UserError, match="sources"):
        capture_of([alone])


def test_a_click_meets_the_surface_where_it_is():
    mesh = sphere(rings=40)
    radius = float(np.linalg.norm(mesh.vertices, axis=1).mean())
    center = mesh.vertices.mean(axis=0)
    for result in (mesh, tiny_cloud(2000)):
        model = model_of("m", result, False, CPU)
        middle = center if result is mesh else np.zeros(3)
        size = radius if result is mesh else 1.0
        origin = middle + size * np.array([3.0, 1.0, -2.0])
        point = hit(model, origin, 5.0 * (middle - origin))
        assert np.linalg.norm(point - middle) == pytest.approx(size, rel=0.06)
        along = (point - origin) / np.linalg.norm(point - origin)
        assert along @ (middle - origin) == pytest.approx(np.linalg.norm(middle - origin))
        assert hit(model, origin, origin - middle) is None


def test_distances_are_told_in_units_and_in_lengths():
    points = [np.zeros(3), np.array([3.0, 4.0, 0.0])]
    assert distance_text([], None) == "Click on a point of the surface."
    assert distance_text(points[:1], None) == "Click on a second point."
    assert distance_text(points, None) == "5 units of the capture"
    assert distance_text(points, 0.1) == "50 cm (5 units of the capture)"
    assert [length_text(x) for x in (2.5, 0.25, 0.0025)] == ["2.5 m", "25 cm", "2.5 mm"]


def test_the_flags_of_a_box_are_read_back_as_the_box():
    one, other = np.array([1.5, -2.0, 1e-7]), np.array([-0.25, 3.0, 12345.0])
    words = shlex.split(box_flags(one, other))
    flags = train_parser(None).parse_flags(words)
    np.testing.assert_allclose(flags["bboxmin"], np.minimum(one, other), rtol=1e-3)
    np.testing.assert_allclose(flags["bboxmax"], np.maximum(one, other), rtol=1e-3)


def test_a_box_has_twelve_edges_and_holds_nearly_all_points():
    points = np.random.default_rng(0).normal(size=(5000, 3))
    points[0] = 1e6
    points[1] = np.nan
    low, high = box_around(points)
    assert inside(points, high, low).mean() > 0.85
    assert high.max() < 5
    edges = box_edges(low, high)
    lengths = np.linalg.norm(edges[:, 1] - edges[:, 0], axis=1)
    np.testing.assert_allclose(np.sort(lengths), np.sort(np.repeat(high - low, 4)))
    assert len({tuple(corner) for corner in edges.reshape(-1, 3).round(9)}) == 8
    assert [corner.tolist() for corner in box_around(np.zeros((0, 3)))] == [[-1] * 3, [1] * 3]


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_the_browser_gets_covariances_that_half_precision_holds(size):
    cloud = tiny_cloud(300)
    cloud = replace(cloud, log_scales=cloud.log_scales + math.log(size), means=cloud.means * size)
    values = splat_values(cloud)
    scale = float(values["scale"])
    sent = values["covariances"].astype(np.float16).astype(np.float64) * scale**2
    gaussians = cloud.activate()
    true = covariances(gaussians.quats, gaussians.scales).double().numpy()
    np.testing.assert_allclose(sent, true, atol=2e-3 * np.abs(true).max())
    np.testing.assert_allclose(values["centers"] * scale, cloud.means.numpy(), rtol=1e-5)


def test_a_textured_mesh_is_sent_in_the_axes_of_the_capture():
    import trimesh

    mesh = textured()
    loaded = trimesh.load(
        trimesh.util.wrap_as_stream(textured_glb(mesh)), file_type="glb", force="mesh"
    )
    expected = mesh.vertices[mesh.faces].reshape(-1, 3).numpy()
    np.testing.assert_allclose(loaded.bounds, [expected.min(0), expected.max(0)], atol=1e-6)


def test_what_is_outside_of_a_box_is_cut_off():
    one, other = np.array([-2.0, -2.0, 0.0]), np.array([2.0, 2.0, 2.0])
    cloud = cut_result(tiny_cloud(), other, one)
    assert 0 < len(cloud) < 200
    assert float(cloud.means[:, 2].min()) >= 0
    for mesh in (icosahedron(), textured()):
        less = cut_result(mesh, one, other)
        assert 0 < less.n_faces < mesh.n_faces
        assert float(less.vertices[less.faces][..., 2].min()) >= 0


def test_a_path_is_one_that_render_takes(tmp_path):
    file = tmp_path / "new" / "path.json"
    write_camera_list(file, between(tiny_cameras()[:3], 11))
    path = [stored.camera for stored in read_cameras_json(file)]
    assert len(path) == 11
    np.testing.assert_allclose(path[5].center, tiny_cameras()[1].center, atol=1e-9)
    with pytest.raises(UserError, match="at least 2 cameras"):
        between(tiny_cameras()[:1], 11)
    assert len(read_cameras_json(file)) == 11


def options_of(*words: object):
    return parse(ViewOptions, [str(word) for word in words])


@pytest.fixture
def page(scene, output, tmp_path):
    """A page that no browser has opened yet."""
    pytest.importorskip("viser")
    options = options_of(output.root, "--scale_factor", 2, "--path_file", tmp_path / "p.json")
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    layers = [
        layer_of(one.title, open_shown(one.path, lambda _: None)[0], False, CPU)
        for one in find_results([output.root], lambda _: None)
    ]
    around = scene_context(layers, views, 2.0, options)
    with closing(open_server("127.0.0.1", free_port(), "test")) as server:
        yield ViewPage(server, layers, around, pytest.fail)


def look(page: ViewPage, x: float = 0.0) -> None:
    view = BrowserView(np.array([x, 0.0, -3.0]), np.array([1.0, 0, 0, 0]), 0.9, 120, 90)
    page.requests.looks(1, view)


def test_our_renderer_works_only_where_it_is_switched_on_and_hides_the_rest(page):
    sent = []

    def make(arranged, camera):
        sent.append(camera)
        return RenderedPicture(None, "")

    page._rendered.make = make
    look(page)
    page.work()
    assert sent == []
    assert page._nodes[TEXTURED].visible
    page._render_panel._on.value = True
    for _ in range(5):
        page.work()
    assert len(sent) == 1
    assert (sent[0].width, sent[0].height) == (120, 90)
    assert not page._nodes[TEXTURED].visible


def test_a_click_on_a_camera_looks_from_there(page):
    from viser import transforms

    camera = tiny_cameras()[4]
    client = SimpleNamespace(camera=SimpleNamespace(), atomic=nullcontext)
    look_through(client, camera)
    np.testing.assert_allclose(client.camera.position, camera.center)
    found = transforms.SO3(client.camera.wxyz).as_matrix()
    np.testing.assert_allclose(found, camera.rotation.T, atol=1e-12)
    assert client.camera.fov == pytest.approx(2 * math.atan(camera.height / 2 / camera.fy))
    assert len(page._frusta) == 10
    assert all(frustum._impl.click_cb for frustum in page._frusta)


def test_points_are_measured_on_what_is_shown(page):
    page._measure._on.value = True
    for x in (0.0, 0.1):
        page._measure.add(np.array([x, 0.0, -3.0]), np.array([0.0, 0.0, 1.0]))
    first, second = page._measure.points
    expected = 2 * np.linalg.norm(second - first)
    assert page._measure.words.content.startswith(length_text(expected))
    page._measure.add(np.array([9.0, 0.0, -3.0]), np.array([0.0, 0.0, 1.0]))
    assert page._measure.words.content == "There is nothing at this point."
    assert len(page._measure.points) == 2


def test_the_box_cuts_all_that_is_shown_and_gives_it_back(page):
    box = page._box
    box.corners[:] = np.array([-2.0, -2.0, 0.0]), np.array([2.0, 2.0, 2.0])
    box._cut.value = True
    page.work()
    counts = {title: len(places) for title, places in kept(page).items()}
    box._cut.value = False
    page.work()
    whole = {title: len(places) for title, places in kept(page).items()}
    assert all(0 < counts[title] < whole[title] for title in (VANILLA, COARSE, REFINED))
    box.corners[:] = np.full(3, 50.0), np.full(3, 51.0)
    box._cut.value = True
    page.work()
    assert TEXTURED in box.words.content
    assert {title: len(places) for title, places in kept(page).items()} == whole


def kept(page: ViewPage) -> dict[str, np.ndarray]:
    return {title: one.points for title, one in page._layers.items()}


def test_a_path_of_too_few_views_is_told_on_the_page(page):
    from sugar_viewer.tool_panels import PathPanel

    panel = PathPanel(page._server, page._context.path_file)
    panel.save(None)
    assert "at least 2 cameras" in panel.words.content
    panel.views = tiny_cameras()[:2]
    panel.save(None)
    assert panel.words.content.startswith("`python -m sugar_pipeline render")
    assert len(read_cameras_json(page._context.path_file)) == 120


def stays_in_view(camera: Camera, points: np.ndarray) -> bool:
    moved = points @ camera.rotation.T + camera.translation
    x = moved[:, 0] / moved[:, 2] * camera.fx + camera.cx
    y = moved[:, 1] / moved[:, 2] * camera.fy + camera.cy
    sides = (x > 0) & (x < camera.width) & (y > 0) & (y < camera.height)
    return bool((sides & (moved[:, 2] > 0)).mean() > 0.98)


def test_the_first_view_shows_all_of_the_result_from_the_front(scene):
    layer = layer_of("ball", icosahedron(), False, CPU)
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    for capture in (None, views):
        camera, up, distance = first_view([layer], capture)
        middle = camera.rotation @ layer.points.mean(axis=0) + camera.translation
        assert np.abs(middle[:2]).max() < 0.05 * middle[2]
        assert middle[2] == pytest.approx(distance, rel=0.05)
        assert stays_in_view(camera, layer.points)
        # Up is up, and nothing leans.
        assert camera.rotation[1] @ up < -0.7
        assert abs(camera.rotation[0] @ up) < 1e-6
    assert up[2] == pytest.approx(1, abs=0.02)


def wall(n: int = 9) -> Scene:
    """Cameras in a row along x before a wall at z = 5, of which the first looks along it."""
    cameras = []
    up = np.array([0.0, -1.0, 0.0])
    for k in range(n):
        place = np.array([k - 4.0, 0.3 * (k % 2), 0.0])
        target = np.array([20.0, 0, 1]) if k == 0 else np.array([0.2 * place[0], 0, 5.0])
        rotation = looking(place, target, up)
        pose = {"rotation": rotation, "translation": -rotation @ place}
        cameras.append(Camera(f"{k}.jpg", 64, 48, 50, 50, 32, 24, **pose))
    return scene_of(cameras)


def test_viewer_report_and_upright_files_have_the_same_front():
    capture = wall()
    axes = upright_axes(capture.calibrated_cameras, capture.points)
    # Who stands before the wall looks along +z.
    assert np.degrees(np.arccos(axes[2] @ [0, 0, -1])) < 20
    np.testing.assert_allclose(axes[1], [0, -1, 0], atol=1e-6)
    mesh = icosahedron()
    mesh = replace(mesh, vertices=mesh.vertices + [0, 0, 5.0])
    matrix = placing_matrix(
        capture.calibrated_cameras, capture.points, mesh.vertices, PlacementOptions(orient="up")
    )
    np.testing.assert_allclose(matrix[:3, :3], axes, atol=1e-9)
    layer = layer_of("wall", mesh, False, CPU)
    camera, up, _ = first_view([layer], capture)
    level = camera.rotation[2] - camera.rotation[2] @ up * up
    np.testing.assert_allclose(-level / np.linalg.norm(level), axes[2], atol=1e-6)
    np.testing.assert_allclose(up, axes[1], atol=1e-9)
    assert stays_in_view(camera, mesh.vertices)


def test_cameras_all_around_have_a_front_that_does_not_lean():
    cameras = cameras_around(12)
    for some in (cameras, cameras[:1]):
        axes = upright_axes(some, np.zeros((0, 3)))
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
        assert np.linalg.det(axes) == pytest.approx(1)
        front = front_direction(some, axes[1])
        assert abs(front @ axes[1]) < 1e-9
        assert front @ some[0].rotation[2] < 0


def test_a_room_is_shown_from_inside():
    """Cameras in its middle turn their backs to it."""
    cameras = []
    for k in range(8):
        ahead = np.array([np.cos(k * np.pi / 4), 0, np.sin(k * np.pi / 4)])
        rotation = looking(0.1 * ahead, 2 * ahead, np.array([0.0, -1.0, 0.0]))
        pose = {"rotation": rotation, "translation": -rotation @ (0.1 * ahead)}
        cameras.append(Camera(f"{k}.jpg", 64, 48, 50, 50, 32, 24, **pose))
    room = icosahedron()
    layer = layer_of("room", replace(room, vertices=5 * room.vertices), False, CPU)
    camera, _, _ = first_view([layer], scene_of(cameras))
    assert np.linalg.norm(camera.center) < 1


@pytest.fixture
def results(tmp_path):
    """A folder as a pipeline hands it out, of a capture in COLMAP's axes."""
    matrix = np.diag([2.0, -2.0, -2.0, 1.0])
    matrix[:3, 3] = 0.5, 1.0, 0.0
    folder = tmp_path / "output" / "scan"
    folder.mkdir(parents=True)
    mesh = textured()
    moved = mesh.vertices.double() @ torch.from_numpy(matrix[:3, :3]).T + torch.tensor(
        matrix[:3, 3]
    )
    style = MeshStyle(y_up=True)
    write_textured_mesh(folder / "mesh.obj", replace(mesh, vertices=moved.float()), style=style)
    write_gaussian_ply(folder / "splats.ply", tiny_cloud())
    told = {"up": "+y", "matrix": matrix.tolist()}
    (folder / "transform.json").write_text(json.dumps(told))
    return SimpleNamespace(folder=folder, matrix=matrix, mesh=mesh)


def test_a_folder_of_results_is_shown_upright(results, capsys):
    found = find_results([results.folder], print)
    assert [one.path.name for one in found] == ["splats.ply", "mesh.obj"]
    np.testing.assert_array_equal(
        common_placement([one.path for one in found]).matrix, results.matrix
    )
    mesh = open_shown(results.folder / "mesh.obj", print)[0]
    layer = layer_of("mesh", mesh, False, CPU)
    camera, up, _ = first_view([layer], None, np.eye(3))
    np.testing.assert_allclose(up, [0, 1, 0])
    assert camera.center[2] > mesh.vertices[:, 2].max()
    assert stays_in_view(camera, layer.points)
    # The browser turns a GLB back to the axes of a capture, but not here.
    corners = glb_points((results.folder / "mesh.glb").read_bytes())
    found, expected = (
        {tuple(row) for row in places.round(4).tolist()} for places in (corners, layer.points)
    )
    assert found == expected


def test_results_in_different_places_are_not_shown_together(results, output):
    with pytest.raises(UserError, match="stand in different places"):
        common_placement([output.obj, results.folder / "mesh.obj"])
    write_textured_mesh(results.folder.parent / "refined_mesh.obj", textured())
    # Of a tree of results the copies that were turned are passed over.
    found = find_results([results.folder.parent], print)
    assert [one.path.name for one in found] == ["refined_mesh.obj"]


def test_cameras_move_along_with_upright_results(results, scene):
    still = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    capture = moved_scene(still, results.matrix)
    assert capture.extent == pytest.approx(2 * still.extent)
    for before, after in zip(still.train_cameras, capture.train_cameras, strict=True):
        points = np.random.default_rng(0).normal(size=(5, 3)) + [0, 0, 5]
        moved = points @ results.matrix[:3, :3].T + results.matrix[:3, 3]
        seen = points @ before.rotation.T + before.translation
        again = moved @ after.rotation.T + after.translation
        np.testing.assert_allclose(again, 2 * seen, atol=1e-6)


def test_a_missing_package_and_a_taken_port_are_one_line(output, monkeypatch, capsys):
    pytest.importorskip("viser")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (output.root, "--no-open", "--host", "127.0.0.1", "--port", port)
        assert run_cli(view.main, *words) == 2
    assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert "'70000' is no port" in refusal(capsys, view.main, output.root, "--port", 70_000)

    def absent(name: str, *rest: object):
        if name == "viser":
            raise ImportError("No module named 'viser'")
        return real(name, *rest)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", absent)
    told = refusal(capsys, view.main, output.root)
    assert "install it with 'pip install viser'" in told


def test_a_scale_by_photographs_needs_a_capture(output):
    options = options_of(output.obj, "--known_distance", "a.png", "b.png", 1)
    with pytest.raises(UserError, match="need a capture"):
        metres_per_unit(None, None, options)


def test_points_of_a_known_distance_are_those_of_the_capture(output, scene):
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    offset = np.array([20_000.0, 5_000.0, 300.0])
    capture = replace(views, offset=offset)
    first = [*views.train_cameras, *views.test_cameras][0]
    point = ",".join(f"{value:.17g}" for value in first.center + offset + [0, 0, 1.5])
    options = options_of(output.obj, "--known_distance", first.name, point, 3.0)
    assert metres_per_unit(Placement(np.eye(4)), capture, options) == pytest.approx(2.0)
    # On a page whose results were made half as large.
    shrunk = np.diag([0.5, 0.5, 0.5, 1.0])
    assert metres_per_unit(Placement(shrunk), capture, options) == pytest.approx(4.0)
