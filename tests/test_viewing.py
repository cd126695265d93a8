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

import view
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.data.reference_layout import read_cameras_json, write_camera_list
from gaussian_splatting.data.scene import load_scene
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.viewing.page_server import BrowserView, closing, look_through, open_server
from sugar_extractors.results import Capture, capture_of
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, write_textured_mesh
from sugar_pipeline.pipeline_flags import train_parser
from sugar_pipeline.render_run import between, model_of, read_result
from sugar_pipeline.tool_panels import (
    box_around,
    box_edges,
    box_flags,
    distance_text,
    hit,
    inside,
    length_text,
)
from sugar_pipeline.view_page import ViewPage, splat_values, textured_glb
from sugar_pipeline.view_run import (
    COARSE,
    COARSE_MESH,
    REFINED,
    TEXTURED,
    VANILLA,
    ViewOptions,
    cut_result,
    find_results,
    first_view,
    layer_of,
    scene_context,
)
from sugar_scene.geometry import covariances
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from tests.support.command_words import parse
from tests.support.mesh_scenes import icosahedron, sphere
from tests.support.refined_models import NAME, refined_state, save_model
from tests.support.tiny_scene import (
    make_tiny_checkpoint,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)

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
    args = train_parser(None).parse_args(words)
    np.testing.assert_allclose(args.bboxmin, np.minimum(one, other), rtol=1e-3)
    np.testing.assert_allclose(args.bboxmax, np.maximum(one, other), rtol=1e-3)


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options_of(*words: object):
    return parse(ViewOptions, [str(word) for word in words])


@pytest.fixture
def page(scene, output, tmp_path):
    """A page that no browser has opened yet."""
    pytest.importorskip("viser")
    options = options_of(output.root, "--scale_factor", 2, "--path_file", tmp_path / "p.json")
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    layers = [
        layer_of(one.title, read_result(one.path, lambda _: None), False, CPU)
        for one in find_results([output.root], lambda _: None)
    ]
    around = scene_context(layers, views, options)
    with closing(open_server("127.0.0.1", free_port(), "test")) as server:
        yield ViewPage(server, layers, around, pytest.fail)


def look(page: ViewPage, x: float = 0.0) -> None:
    view = BrowserView(np.array([x, 0.0, -3.0]), np.array([1.0, 0, 0, 0]), 0.9, 120, 90)
    page.requests.looks(1, view)


def test_our_renderer_works_only_where_it_is_switched_on_and_hides_the_rest(page):
    sent = []
    page._rendered.make = lambda arranged, camera: (sent.append(camera), (None, ""))[1]
    look(page)
    page.work()
    assert sent == []
    assert page._nodes[TEXTURED].visible
    page._own._on.value = True
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
    from sugar_pipeline.tool_panels import PathPanel

    panel = PathPanel(page._server, page._around.path_file)
    panel.save(None)
    assert "at least 2 cameras" in panel.words.content
    panel.views = tiny_cameras()[:2]
    panel.save(None)
    assert panel.words.content.startswith("`python render.py")
    assert len(read_cameras_json(page._around.path_file)) == 120


def test_the_first_view_looks_at_the_result(scene):
    layer = layer_of("ball", icosahedron(), False, CPU)
    camera, up, distance = first_view([layer], None)
    ahead = camera.rotation @ np.zeros(3) + camera.translation
    assert abs(ahead[0]) < 0.05 * ahead[2]
    assert ahead[2] == pytest.approx(distance, rel=0.05)
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    camera, up, distance = first_view([layer], views)
    assert camera is views.train_cameras[0]
    assert up[2] == pytest.approx(1, abs=0.02)
    assert distance == pytest.approx(3, abs=0.3)


def test_a_missing_package_and_a_taken_port_are_one_line(output, monkeypatch, capsys):
    pytest.importorskip("viser")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (output.root, "--no-open", "--host", "127.0.0.1", "--port", port)
        assert run_cli(view.main, *words) == 2
    assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert run_cli(view.main, output.root, "--port", 70_000) == 2
    assert "'70000' is no port" in capsys.readouterr().err

    def absent(name: str, *rest: object):
        if name == "viser":
            raise ImportError("No module named 'viser'")
        return real(name, *rest)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", absent)
    assert run_cli(view.main, output.root) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "install it with 'pip install viser'" in told


def test_a_scale_by_photographs_needs_a_capture(output):
    options = options_of(output.obj, "--known_distance", "a.png", "b.png", 1)
    with pytest.raises(UserError, match="need a capture"):
        scene_context([layer_of("ball", icosahedron(), False, CPU)], None, options)
