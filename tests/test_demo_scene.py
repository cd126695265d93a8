# SPDX-License-Identifier: Apache-2.0
"""The demo scene: its geometry is what it claims to be, its capture fits it, and it is reused."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pycolmap
import pytest
import torch
from PIL import Image
from plyfile import PlyData
from scipy.spatial import cKDTree

from gaussian_splatting.scenes.scene import load_scene
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_pipeline.demo.demo_surface import N_ALONG, N_AROUND, make_knot, rope_knot, visible
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError

SMALL = {"n_views": 6, "width": 64, "height": 48}


def ignore(_message: str) -> None:
    """Takes messages that a test does not look at."""


def file_states(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: what changes when one is written again."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def contents(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def vectors(ply: PlyData, names: str) -> np.ndarray:
    return np.stack([ply["vertex"][name] for name in names.split()], axis=1).astype(float)


@pytest.fixture(scope="module", autouse=True)
def coarse_light() -> Iterator[None]:
    """Light the scene with few rays: no test needs soft light, and it takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sugar_pipeline.demo.demo_texture._N_FILL_RAYS", 6)
        yield


@pytest.fixture(scope="module")
def demo(coarse_light, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "scene"
    assert make_demo_scene(root, **SMALL, notify=ignore)
    return root


@pytest.fixture
def copied(demo, tmp_path) -> Path:
    return Path(shutil.copytree(demo, tmp_path / "scene"))


def test_the_scene_reader_takes_it_without_a_notice(demo):
    scene = load_scene(demo, size_rule=SugarSize(), eval_split=False, notify=pytest.fail)
    assert [camera.name for camera in scene.train_cameras] == [
        f"view_{k:03d}.png" for k in range(6)
    ]
    assert {(camera.width, camera.height) for camera in scene.train_cameras} == {(64, 48)}
    assert len(scene.points) > 1000
    for camera in scene.train_cameras:
        assert camera.image_path.is_file()
        assert abs(camera.cx - 32) > 0.5
        assert abs(camera.cy - 24) > 0.5
        assert camera.center[2] > 0.5


def test_every_point_has_three_views_or_more_and_lies_on_its_surface(demo):
    model = pycolmap.Reconstruction(str(demo / "sparse" / "0"))
    assert model.num_reg_images() == 6
    assert min(point.track.length() for point in model.points3D.values()) >= 3
    assert model.compute_mean_reprojection_error() < 0.3
    positions = np.array([point.xyz for point in model.points3D.values()])
    samples = vectors(PlyData.read(str(demo / "gt_visible.ply")), "x y z")
    distance, _ = cKDTree(samples).query(positions)
    assert distance.max() < 0.015
    facts = json.loads((demo / "gt.json").read_text())
    assert facts["points3D"] == len(positions)


def test_points_have_the_colours_of_the_pixels_that_show_them(demo):
    scene = load_scene(demo, size_rule=SugarSize(), eval_split=False, notify=ignore)
    model = pycolmap.Reconstruction(str(demo / "sparse" / "0"))
    right, shifted = [], []
    for image in model.images.values():
        camera = next(c for c in scene.train_cameras if c.name == image.name)
        pixels = np.asarray(Image.open(camera.image_path)).astype(float)
        points = [model.points3D[p.point3D_id] for p in image.points2D if p.has_point3D()]
        xyz = np.array([p.xyz for p in points]) @ camera.rotation.T + camera.translation
        x = (camera.fx * xyz[:, 0] / xyz[:, 2] + camera.cx).astype(int)
        y = (camera.fy * xyz[:, 1] / xyz[:, 2] + camera.cy).astype(int)
        colors = np.array([p.color for p in points], float)
        right.append(np.abs(pixels[y.clip(0, 47), x.clip(0, 63)] - colors))
        shifted.append(np.abs(pixels[y.clip(0, 47), (x + 6).clip(0, 63)] - colors))
    assert np.median(np.concatenate(right)) < 12
    assert np.median(np.concatenate(shifted)) > 2 * np.median(np.concatenate(right))


def test_the_object_is_a_closed_surface_with_outward_normals(demo):
    ply = PlyData.read(str(demo / "gt_object.ply"))
    points, normals = vectors(ply, "x y z"), vectors(ply, "nx ny nz")
    faces = np.stack(ply["face"]["vertex_indices"])
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    assert set(Counter(map(tuple, np.sort(edges, axis=1))).values()) == {2}
    assert len({*map(tuple, edges)}) == len(edges), "neighbours disagree on the orientation"
    a, b, c = (points[faces[:, k]] for k in range(3))
    cross = np.cross(b - a, c - a)
    assert np.linalg.norm(cross, axis=1).min() > 0
    assert np.einsum("fd,fd->", a, np.cross(b, c)) / 6 > 0.02, "inside out"
    unit = cross / np.linalg.norm(cross, axis=1, keepdims=True)
    for corner in range(3):
        assert (unit * normals[faces[:, corner]]).sum(axis=1).min() > 0.9
    assert np.ptp(points, axis=0).max() == pytest.approx(1, abs=1e-6)
    assert 20_000 <= len(faces) <= 60_000


def test_the_rope_does_not_run_through_itself():
    s = np.arange(N_ALONG) / N_ALONG
    ring = [rope_knot(s, np.full(N_ALONG, w)) for w in np.arange(16) / 16]
    center = np.mean(ring, axis=0)
    radius = max(np.linalg.norm(points - center, axis=1).max() for points in ring)
    apart = np.linalg.norm(center[:, None] - center[None], axis=2)
    along = np.abs(np.arange(N_ALONG)[:, None] - np.arange(N_ALONG)[None])
    far = np.minimum(along, N_ALONG - along) > N_ALONG // 8
    assert apart[far].min() > 2 * radius + 0.3


def test_normals_are_those_of_the_smooth_surface():
    i, j = np.indices((N_ALONG, N_AROUND)).reshape(2, -1)
    s, w, h = i / N_ALONG, j / N_AROUND, 1e-6
    along = rope_knot(s + h, w) - rope_knot(s - h, w)
    around = rope_knot(s, w + h) - rope_knot(s, w - h)
    cross = np.cross(around, along)
    expected = cross / np.linalg.norm(cross, axis=1, keepdims=True)
    assert (make_knot().normals * expected).sum(axis=1).min() > 0.999


def test_the_ground_follows_the_object_in_the_files(demo):
    facts = json.loads((demo / "gt.json").read_text())
    mesh = PlyData.read(str(demo / "gt_mesh.ply"))
    points, faces = vectors(mesh, "x y z"), np.stack(mesh["face"]["vertex_indices"])
    n_points, n_faces = facts["object_vertices"], facts["object_faces"]
    assert (n_points, n_faces) == (N_ALONG * N_AROUND, 2 * N_ALONG * N_AROUND)
    assert faces[:n_faces].max() < n_points <= faces[n_faces:].min()
    assert (points[n_points:, 2] == 0).all()
    visible = PlyData.read(str(demo / "gt_visible.ply"))
    samples, normals = vectors(visible, "x y z"), vectors(visible, "nx ny nz")
    n_object = facts["gt_visible_object_samples"]
    assert 1000 < n_object < len(samples) == facts["gt_visible_samples"]
    assert (samples[n_object:, 2] == 0).all()
    assert (normals[n_object:, 2] == 1).all()
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, atol=1e-5)


def hits_any(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, start: np.ndarray, way: np.ndarray
) -> bool:
    """Whether the segment start + t way, 0 < t < 1, meets a triangle (Moeller and Trumbore)."""
    e1, e2 = b - a, c - a
    p = np.cross(way, e2)
    scale = 1 / (e1 * p).sum(axis=1)
    s = start - a
    q = np.cross(s, e1)
    u, v, t = (s * p).sum(axis=1) * scale, q @ way * scale, (e2 * q).sum(axis=1) * scale
    return bool(((u > 0) & (v > 0) & (u + v < 1) & (t > 0) & (t < 1)).any())


def test_visibility_agrees_with_a_test_of_every_triangle():
    knot = make_knot()
    eyes = np.array([[1.5, -1.2, 0.9], [-0.3, 1.9, 0.4]])
    rows = np.random.default_rng(1).choice(knot.n_vertices, 60, replace=False)
    points, normals = knot.vertices[rows], knot.normals[rows]
    seen = visible(knot, points, normals, eyes)
    corners = [knot.vertices[knot.faces[:, k]] for k in range(3)]
    for view, eye in enumerate(eyes):
        for k in range(60):
            way = eye - points[k]
            facing = way @ normals[k] > 0.1 * np.linalg.norm(way) and points[k, 2] > -1e-6
            start = points[k] + 1e-3 * normals[k]
            assert seen[view, k] == (facing and not hits_any(*corners, start, eye - start))
    assert seen.any()
    assert not seen.all()


def test_a_second_call_writes_nothing(demo):
    before = file_states(demo)
    assert not make_demo_scene(demo, **SMALL, notify=ignore)
    assert file_states(demo) == before


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_half_written_scene_is_made_again_with_the_same_bytes(demo, copied):
    (copied / "demo.json").unlink()
    (copied / "images/view_003.png").write_bytes(b"half")
    (copied / "sparse/0/points3D.bin").unlink()
    (copied / "gt.json.tmp-999999999.json").write_text("{")
    assert make_demo_scene(copied, **SMALL, notify=ignore)
    assert contents(copied) == contents(demo)


def test_other_parameters_make_another_scene(copied):
    (copied / "sparse/0/points3D.ply").write_bytes(b"cache of another scene")
    assert make_demo_scene(copied, n_views=5, width=40, height=30, seed=1, notify=ignore)
    assert sorted(path.name for path in (copied / "images").iterdir())[-1] == "view_004.png"
    assert Image.open(copied / "images" / "view_004.png").size == (40, 30)
    assert not (copied / "sparse" / "0" / "points3D.ply").exists()


@pytest.mark.parametrize("damage", ["demo.json", "images/view_001.png", "sparse/0/cameras.bin"])
def test_a_damaged_scene_is_not_reused(copied, damage, monkeypatch):
    (copied / damage).write_bytes(b"{}")
    built = []
    monkeypatch.setattr(
        "sugar_pipeline.demo.demo_scene._build", lambda *_: built.append(1) or fail()
    )
    with pytest.raises(UserError, match="cannot write the demo scene"):
        make_demo_scene(copied, **SMALL, notify=ignore)
    assert built
    assert not (copied / "demo.json").exists()


def fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["images/holiday.jpg", "images/a/b.PNG", "sparse/0/images.bin"])
def test_a_folder_with_another_capture_is_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(UserError, match="holds another capture"):
        make_demo_scene(tmp_path, **SMALL, notify=ignore)
    assert contents(tmp_path) == {name: b"precious"}


def test_impossible_parameters_are_refused(tmp_path):
    with pytest.raises(UserError, match="at least 3 views"):
        make_demo_scene(tmp_path / "new", n_views=2, notify=ignore)
    assert not (tmp_path / "new").exists()
