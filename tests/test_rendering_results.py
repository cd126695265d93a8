# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos of results: paths that look where they should, files that others can open."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.data.cameras import Camera, looked_at
from gaussian_splatting.formats.ply import write_gaussian_ply
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, write_textured_mesh
from sugar_scene.triangle_mesh import TriangleMesh, write_mesh_ply
from sugar_utils.errors import UserError
from sugar_viewer import picture_files
from sugar_viewer.camera_paths import between, turntable
from sugar_viewer.picture_files import write_video
from sugar_viewer.shown_models import ShownModel, depths_of_views, open_model, shown
from tests.support.mesh_scenes import icosahedron
from tests.support.random_scenes import look_at
from tests.support.refined_models import refined_state, save_model
from tests.support.tiny_scene import (
    HEIGHT,
    WIDTH,
    make_tiny_checkpoint,
    make_tiny_scene,
    run_cli,
    tiny_cameras,
)
from tests.support.verbs import render

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    """A scene with its Gaussians, a refined model and a textured icosahedron."""
    root = tmp_path_factory.mktemp("render")
    scene = make_tiny_scene(root / "scene")
    mesh = icosahedron()
    textured = TexturedMesh(
        torch.from_numpy(mesh.vertices).float(),
        torch.from_numpy(mesh.faces),
        torch.rand(20, 3, 2),
        torch.full((4, 4, 3), 200, dtype=torch.uint8),
    )
    write_textured_mesh(root / "mesh.obj", textured)
    write_gaussian_ply(root / "cloud.ply", scene.cloud)
    return {
        "scene": scene,
        "vanilla": make_tiny_checkpoint(root / "vanilla", scene),
        "refined": save_model(root, refined_state()),
        "obj": root / "mesh.obj",
        "ply": root / "cloud.ply",
    }


def render_results(inputs, output, *words) -> int:
    return run_cli(render.main, *words, "-s", inputs["scene"].root, "-o", output)


def frames_of(path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_a_turntable_goes_around_what_the_cameras_look_at():
    cameras = tiny_cameras()
    target = looked_at(cameras)
    np.testing.assert_allclose(target, 0, atol=0.2)
    path = turntable(cameras, np.zeros((0, 3)), 8)
    for camera in path:
        inside = camera.rotation @ target + camera.translation
        np.testing.assert_allclose(inside[:2], 0, atol=1e-9)
        assert inside[2] > 2.5
        np.testing.assert_allclose(camera.rotation @ camera.rotation.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(camera.rotation) == pytest.approx(1)
        # Upright: the world's vertical has no part along the image's rows.
        assert abs(camera.rotation[0, 2]) < 1e-2
        assert camera.rotation[1, 2] < -0.9
    steps = [np.linalg.norm(a.center - b.center) for a, b in zip(path, path[1:], strict=False)]
    np.testing.assert_allclose(steps, steps[0], rtol=1e-9)
    first = path[0].center - target
    assert first[:2] @ cameras[0].center[:2] > 0.9 * np.linalg.norm(first[:2]) * 3


def test_what_all_look_at_in_parallel_is_ahead_of_them():
    cameras = [look_at((x, 0, 0), target=(x, 5, 0)) for x in (-1.0, 1.0)]
    np.testing.assert_allclose(looked_at(cameras), [0, 1, 0], atol=1e-6)


def test_a_path_passes_through_its_cameras_and_turns_evenly():
    cameras = tiny_cameras(4)
    path = between(cameras, 31)
    for k, camera in enumerate(cameras):
        np.testing.assert_allclose(path[10 * k].center, camera.center, atol=1e-9)
        np.testing.assert_allclose(path[10 * k].rotation, camera.rotation, atol=1e-9)
    moved = [np.linalg.norm(a.center - b.center) for a, b in zip(path, path[1:], strict=False)]
    assert max(moved) < 3 * min(moved)
    with pytest.raises(UserError, match="at least 2 cameras"):
        between(cameras[:1], 5)


@pytest.mark.parametrize("kind", ["vanilla", "ply", "refined", "obj"])
def test_every_result_shows_the_ball_where_it_is(kind, inputs):
    model = open_model(inputs[kind], True, CPU, lambda _: None)
    camera = inputs["scene"].cameras[0]
    image = shown(model, "image", camera)
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert image[0, 0].min() > 250
    assert image[HEIGHT // 2, WIDTH // 2].min() < 240
    depth, normal = model.geometry(camera)
    ray = np.linalg.norm(camera.center)
    assert float(depth[HEIGHT // 2, WIDTH // 2]) == pytest.approx(ray - 0.9, abs=0.2)
    assert torch.isinf(depth[0, 0])
    assert float(normal[HEIGHT // 2, WIDTH // 2, 2]) < -0.7
    depths = depths_of_views(model, [camera])
    assert ray - 1 < depths.near < depths.far < ray + 1
    picture = shown(model, "depth", camera, depths)
    assert picture[0, 0].min() == 255
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20
    blue = shown(model, "normal", camera)[HEIGHT // 2, WIDTH // 2]
    assert blue[2] > 215


def test_a_video_of_two_results_side_by_side_opens(inputs, tmp_path):
    words = (inputs["ply"], inputs["obj"], "--show", "image", "depth", "--n_frames", 5, "--fps", 10)
    assert render_results(inputs, tmp_path / "a.mp4", *words) == 0
    frames = frames_of(tmp_path / "a.mp4")
    assert len(frames) == 5
    assert {frame.shape for frame in frames} == {(HEIGHT // 2 * 2, 4 * WIDTH // 2 * 2, 3)}
    assert frames[0][HEIGHT // 2, WIDTH // 2].std() > 5
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_held_out_views_are_named_as_their_photographs(inputs, tmp_path):
    assert render_results(inputs, tmp_path / "views", inputs["vanilla"], "--path", "test") == 0
    names = sorted(path.name for path in (tmp_path / "views").iterdir())
    assert names == ["view_00.png", "view_08.png"]
    with Image.open(tmp_path / "views" / names[0]) as picture:
        found = np.asarray(picture).astype(float)
    with Image.open(inputs["scene"].root / "images" / names[0]) as picture:
        photograph = np.asarray(picture).astype(float)
    assert np.abs(found - photograph).mean() < 20


NAMES = [
    (["2.jpg", "3.png", "a/1.jpg", "b.c/4"], ["2", "3", "a_1", "b.c_4"]),
    (["2.jpg", "2.png", "3.png"], ["2.jpg", "2.png", "3"]),
    (["a/1.jpg", "a_1.jpg", "a_1.png"], ["a_1.jpg", "a_1.jpg_2", "a_1.png"]),
    (["1.JPG", "1.jpg", "1.jpg_2"], ["1.JPG", "1.jpg_2", "1.jpg_2_2"]),
    (["x.jpg", "x.png", "x.jpg.png"], ["x.jpg_2", "x.png", "x.jpg"]),
]


@pytest.mark.parametrize(("views", "expected"), NAMES)
def test_pictures_have_names_of_their_own(views, expected):
    """On file systems that do not tell upper case apart as well."""
    names = picture_files.picture_names(views)
    assert len({name.lower() for name in names}) == len(views)
    assert names == expected


def test_photographs_that_differ_in_their_extension_have_a_picture_each(inputs, tmp_path):
    source = json.loads((inputs["vanilla"] / "cameras.json").read_text())
    for number, name in enumerate(("2.jpg", "2.png", "3.png")):
        source[number]["img_name"] = name
    (tmp_path / "path.json").write_text(json.dumps(source[:3]))
    words = (inputs["ply"], "--path", tmp_path / "path.json")
    assert render_results(inputs, tmp_path / "views", *words) == 0
    files = sorted(path.name for path in (tmp_path / "views").iterdir())
    assert files == ["2.jpg.png", "2.png.png", "3.png"]


def test_a_path_may_come_from_a_file(inputs, tmp_path, capsys):
    path = inputs["vanilla"] / "cameras.json"
    assert render_results(inputs, tmp_path / "a.mp4", inputs["ply"], "--path", path) == 0
    assert len(frames_of(tmp_path / "a.mp4")) == 10
    (tmp_path / "empty.json").write_text("[]")
    words = (inputs["ply"], "--path", tmp_path / "empty.json")
    assert render_results(inputs, tmp_path / "b.mp4", *words) == 2
    assert "holds no list of cameras" in capsys.readouterr().err
    assert render_results(inputs, tmp_path / "b.mp4", inputs["ply"], "--path", "spiral") == 2
    assert "choose one of test, train, all, turntable, between, or" in capsys.readouterr().err


def test_the_same_call_gives_the_same_bytes(inputs, tmp_path):
    for name in ("a", "b"):
        words = ("--path", "between", "--every", 3, "--n_frames", 3, "--show", "normal")
        assert render_results(inputs, tmp_path / name, inputs["ply"], *words) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_what_cannot_be_shown_is_one_line(inputs, tmp_path, capsys):
    (tmp_path / "note.txt").write_text("")
    mesh = icosahedron()
    empty = tmp_path / "empty.ply"
    write_mesh_ply(empty, TriangleMesh(mesh.vertices, mesh.faces[:0], mesh.colors))
    cases = [
        ((empty, "--show", "normal"), tmp_path / "a.mp4", "has no triangles to show"),
        ((tmp_path / "gone.ply",), tmp_path / "a.mp4", "no such file"),
        ((tmp_path / "note.txt",), tmp_path / "a.mp4", "neither Gaussians nor a mesh"),
        ((inputs["ply"], "--show", "clay"), tmp_path / "a.mp4", "has no mesh"),
        ((inputs["ply"],), tmp_path / "note.txt", "is a file"),
        ((inputs["ply"],), tmp_path / "a.avi", "neither NAME.mp4 nor a folder"),
    ]
    for words, output, message in cases:
        assert render_results(inputs, output, *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.ply", "note.txt"]


@pytest.mark.parametrize("size", [(1, 1), (20_000, 4), (3, 20_000), (16_386, 2)])
def test_pictures_that_no_video_can_have_are_one_line(size, inputs, tmp_path, capsys):
    width, height = size
    cameras = json.loads((inputs["vanilla"] / "cameras.json").read_text())[:2]
    path = tmp_path / "path.json"
    path.write_text(json.dumps([camera | {"width": width, "height": height} for camera in cameras]))
    words = (inputs["ply"], "--path", path)
    assert render_results(inputs, tmp_path / "a.mp4", *words) == 2
    error = capsys.readouterr().err
    assert f"16,384 pixels a side, not {width:,} x {height:,}" in error
    assert error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["path.json"]


def test_a_codec_that_refuses_is_one_line_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_files, "_SIDES", (1, 10**6))
    with pytest.raises(UserError, match="codec failed .* name a folder as --output") as refused:
        write_video(tmp_path / "a.mp4", [np.zeros((4, 20_000, 3), np.uint8)], 5)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_path_of_one_picture_is_a_video_of_one(inputs, tmp_path):
    for path in ("turntable", "between"):
        words = (inputs["ply"], "--path", path, "--n_frames", 1)
        assert render_results(inputs, tmp_path / f"{path}.mp4", *words) == 0
        assert len(frames_of(tmp_path / f"{path}.mp4")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fps", 2147483648), "--fps 2147483648: "),
        (("--path", "between", "--every", 100), "--every 100: leaves 1 of 10 photographs"),
        (("--path", "between", "--every", 10), "use --every 9 or less"),
    ],
)
def test_numbers_that_make_no_video_are_named(words, message, inputs, tmp_path, capsys):
    assert render_results(inputs, tmp_path / "a.mp4", inputs["ply"], *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_video_of_pictures_of_several_sizes_keeps_the_first(tmp_path):
    pictures = [np.full(shape, 90, np.uint8) for shape in ((31, 41, 3), (60, 20, 3))]
    write_video(tmp_path / "a.mp4", pictures, 5)
    assert [frame.shape for frame in frames_of(tmp_path / "a.mp4")] == [(30, 40, 3)] * 2
    with pytest.raises(UserError, match="no pictures"):
        write_video(tmp_path / "b.mp4", [], 5)
    assert not (tmp_path / "b.mp4").exists()


def test_paths_keep_size_and_lens():
    camera = tiny_cameras()[0]
    for path in (turntable(tiny_cameras(), np.zeros((0, 3)), 3), between(tiny_cameras(), 3)):
        for frame in path:
            assert isinstance(frame, Camera)
            assert (frame.width, frame.cx, frame.fx) == (camera.width, camera.cx, camera.fx)
            assert frame.image_path is None


def test_what_is_far_behind_leaves_the_rest_its_colours():
    depth = torch.full((40, 40), 900.0)
    depth[:20] = torch.linspace(4.0, 6.0, 800).view(20, 40)
    depth[0] = torch.inf
    model = ShownModel("made up", None, lambda _: (depth, None), None, None)
    near, far = depths_of_views(model, [None])
    assert 4.1 < near < 4.2
    assert 12.0 < far < 18.0
    depth[20:] = 7.0
    assert depths_of_views(model, [None]).far == pytest.approx(7.0)
