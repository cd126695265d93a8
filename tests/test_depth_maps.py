# SPDX-License-Identifier: Apache-2.0
"""Depth maps beside photographs: found, aligned with the points, checked, and trained with."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.components.depth_supervision import (
    DEPTH_NOISE,
    depth_errors,
    depth_term,
    inverse_depths,
)
from gaussian_splatting.data.maps.depth_maps import (
    DepthMap,
    DepthOptions,
    KnownDepths,
    known_depths,
)
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.runner import run_stage
from gaussian_splatting.engine.strips import ImageSplit, ViewPass
from gaussian_splatting.engine.training_views import ImageStrip, TrainingView
from gaussian_splatting.losses.texture import TEXTURE, texture_weights
from gaussian_splatting.rasterization import Rows, project
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_utils.errors import UserError
from tests.support.depth_scenes import load
from tests.support.room import Room, make_room
from tests.support.tiny_scene import make_tiny_scene, tiny_cloud

MILLIMETRES = 700.0
"""The sensor's unit: a unit of the scene is 0.7 m."""


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Room:
    return make_room(tmp_path_factory.mktemp("room") / "scene", n_views=10, width=64, n_points=300)


def with_depths(room: Room, root: Path, make, suffix: str = ".png") -> Path:
    """A copy of the room with depth maps at half the size of the photographs."""
    shutil.copytree(room.root, root)
    (root / "depths").mkdir()
    for number, (name, depth) in enumerate(room.depths.items()):
        values = make(number, depth[1::2, 1::2])
        save(root / "depths" / (Path(name).stem + suffix), values)
    return root


def save(path: Path, values: np.ndarray) -> None:
    if path.suffix == ".npy":
        np.save(path, values.astype(np.float32))
    elif path.suffix == ".tif":
        Image.fromarray(values.astype(np.float32)).save(path)
    else:
        Image.fromarray(np.clip(values, 0, 65535).astype(np.uint16)).save(path)


def sensor(number: int, depth: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(number).normal(size=depth.shape)
    return MILLIMETRES * depth * (1 + 0.01 * noise)


def relative_errors(room: Room, known: KnownDepths) -> np.ndarray:
    """Median relative error of each map that is left."""
    errors = []
    for camera in room.cameras:
        found = known.of(camera, torch.device("cpu"))
        if found is not None:
            ratio = found.numpy() / room.depths[camera.name]
            errors.append(np.median(np.abs(ratio - 1)))
    return np.array(errors)


def test_maps_end_where_masks_do(room, tmp_path):
    root = with_depths(room, tmp_path / "scene", sensor)
    (root / "masks").mkdir()
    camera = room.cameras[0]
    mask = np.zeros((camera.height, camera.width), dtype=np.uint8)
    mask[:, : camera.width // 2] = 255
    for view in room.cameras:
        Image.fromarray(mask).save(root / "masks" / view.name)
    scene = load_scene(
        root,
        size_rule=VanillaSize(),
        eval_split=False,
        masks=MaskOptions(),
        depths=DepthOptions(),
        notify=lambda line: None,
    )
    found = scene.depths.of(scene.train_cameras[0], torch.device("cpu"))
    assert bool((found[:, : camera.width // 2] > 0).all())
    assert bool((found[:, camera.width // 2 :] == 0).all())


def test_maps_of_folders_with_equal_names_are_told_apart(room, tmp_path):
    root = with_depths(room, tmp_path / "scene", sensor)
    first, second = (replace(room.cameras[0], name=f"{folder}/a.png") for folder in "xy")
    for folder, values in (("x", 2000.0), ("y", 3000.0)):
        (root / "depths" / folder).mkdir()
        depth = np.full((first.height, first.width), values)
        save(root / "depths" / folder / "a.png", depth)
    told: list[str] = []
    known = known_depths([first, second], root, DepthOptions(), None, told.append)
    assert [float(m.values[0, 0]) for m in known.maps.values()] == pytest.approx([2.0, 3.0])
    outside = replace(first, name="z/a.png")
    assert not known_depths([outside], root, DepthOptions(), None, told.append).maps


@pytest.mark.parametrize("suffix", [".png", ".npy", ".tif"])
def test_maps_of_a_sensor_get_the_unit_of_the_scene(room, tmp_path, suffix):
    known, lines = load(with_depths(room, tmp_path / "scene", sensor, suffix))
    assert lines == ["depth maps of 10 of 10 photographs, in one unit"]
    errors = relative_errors(room, known)
    assert len(errors) == 10
    assert errors.max() < 0.02


def test_maps_of_an_estimator_are_aligned_one_by_one(room, tmp_path):
    def estimator(number: int, depth: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(number)
        return 40_000 * (rng.uniform(0.3, 0.9) / depth + rng.uniform(0.05, 0.5))

    known, lines = load(with_depths(room, tmp_path / "scene", estimator))
    assert "reciprocals, each with a scale and a shift" in lines[0]
    # The white wall has no points and lies behind all that have.
    assert relative_errors(room, known).max() < 0.04


def test_a_map_of_another_view_is_named_and_left_out(room, tmp_path):
    root = with_depths(room, tmp_path / "scene", sensor)
    turned = np.asarray(Image.open(root / "depths" / "view_03.png"))[::-1] // 2
    Image.fromarray(turned.copy()).save(root / "depths" / "view_03.png")
    known, lines = load(root)
    assert "view_03.png (off by" in lines[1]
    assert set(known.maps) == {camera.name for camera in room.cameras} - {"view_03.png"}


def test_maps_of_another_capture_are_all_left_out(room, tmp_path):
    def other(number: int, depth: np.ndarray) -> np.ndarray:
        return np.random.default_rng(number).uniform(500, 4000, size=depth.shape)

    known, lines = load(with_depths(room, tmp_path / "scene", other))
    assert not known.maps
    assert lines[0].startswith("left out all depth maps")


def test_unknown_and_doubtful_pixels_are_left_out(room, tmp_path):
    def partial(number: int, depth: np.ndarray) -> np.ndarray:
        values = sensor(number, depth)
        values[0], values[1], values[2] = np.nan, np.inf, -1
        return values

    root = with_depths(room, tmp_path / "scene", partial, ".npy")
    for path in (root / "depths").iterdir():
        values = np.load(path).astype(np.float64)
        values[3] = 1e300  # infinite in float32
        np.save(path, values)
    (root / "confidence").mkdir()
    height, width = room.cameras[0].height // 2, room.cameras[0].width // 2
    levels = np.full((height, width), 2, dtype=np.uint8)
    levels[-1] = 0
    for camera in room.cameras:
        Image.fromarray(levels).save(root / "confidence" / camera.name)
    known, _ = load(root)
    for found in known.maps.values():
        assert (found.values[[0, 1, 2, 3, -1]] == 0).all()
        assert (found.values[4:-1] > 0).all()


def without_tracks(room: Room, root: Path, ending: str) -> None:
    """Make the cameras of a copy of the room those of a transforms.json, which names its maps."""
    (root / "depths").rename(root / "lidar")
    shutil.rmtree(root / "sparse")
    camera = room.cameras[0]
    frames = []
    for view in room.cameras:
        pose = np.eye(4)
        pose[:3, :3] = view.rotation.T * (1, -1, -1)
        pose[:3, 3] = view.center
        frames.append(
            {
                "file_path": f"images/{view.name}",
                "transform_matrix": pose.tolist(),
                "depth_file_path": f"lidar/{Path(view.name).stem}{ending}",
            }
        )
    lens = {"fl_x": camera.fx, "fl_y": camera.fy, "cx": camera.cx, "cy": camera.cy}
    (root / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))


UNITS = [
    (".png", np.uint16, "auto", 1000),
    (".tif", np.uint16, "auto", 1000),
    (".npy", ">u2", "auto", 1000),
    (".npy", np.int32, "auto", 1000),
    (".tif", np.float32, "auto", 1),
    (".npy", ">f4", "auto", 1),
    (".npy", np.float64, "mm", 1000),
    (".png", np.uint16, "m", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "kind", "unit", "per_metre"), UNITS)
def test_whole_numbers_are_millimetres_where_no_points_tell_the_unit(
    room, tmp_path, ending, kind, unit, per_metre
):
    root = tmp_path / "scene"
    shutil.copytree(room.root, root)
    (root / "depths").mkdir()
    for name, depth in room.depths.items():
        values = (per_metre * depth[1::2, 1::2]).astype(kind)
        path = root / "depths" / (Path(name).stem + ending)
        np.save(path, values) if ending == ".npy" else Image.fromarray(values).save(path)
    without_tracks(room, root, ending)
    known, lines = load(root, depth_unit=unit)
    if unit == "auto":
        numbers = "floats as metres" if per_metre == 1 else "whole numbers as millimetres"
        assert f"{numbers}, because no points tell their scale (--depth_unit)" in lines[0]
    else:
        assert f"in {unit} by --depth_unit" in lines[0]
    name = room.cameras[0].name
    values = known.maps[f"images/{name}"].values.numpy()
    expected = (per_metre * room.depths[name][1::2, 1::2]).astype(kind) / per_metre
    assert np.allclose(values, expected, atol=1e-6)


def npy_with(header: str) -> bytes:
    """An NPY file of version 1 with a header and a few bytes of content."""
    text = f"{header}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (np.ones((7, 40)), "another aspect ratio"),
        (b"no numbers", "cannot read the depth map"),
        (np.ones((2, 3, 4, 5)), "not one channel"),
        (np.array([["a", "b"]]), "not one channel"),
        (b"", "cannot read the depth map"),
        (npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3"), "cannot read"),
        (npy_with("{'descr': '<f4', 'shape': (((((((((((2,)"), "cannot read"),
        (npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9,)}"), "cannot read"),
        (
            npy_with("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000000)}"),
            "cannot read the depth map",
        ),
        (b"PK" + bytes(100), "cannot read the depth map"),
        (b"PK\5\6" + bytes(18), "a ZIP file of arrays"),
    ],
    ids=[
        *("aspect", "text", "shape", "type", "empty", "header", "brackets", "no literal", "huge"),
        *("PK", "archive"),
    ],
)
@pytest.mark.parametrize("folder", ["depths", "confidence"])
def test_a_file_that_is_no_depth_map_is_one_line(room, tmp_path, content, told, folder):
    root = with_depths(room, tmp_path / "scene", sensor, ".npy")
    path = root / folder / "view_02.npy"
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
        told = told if folder == "depths" else f"{told}|not the size of"
    with pytest.raises(UserError, match=told) as error:
        load(root)
    assert "view_02" in str(error.value)


def test_a_folder_that_is_not_there_or_has_other_names_is_one_line(room, tmp_path):
    root = with_depths(room, tmp_path / "scene", sensor)
    with pytest.raises(UserError, match="no such folder"):
        load(root, depths="lidar")
    for path in (root / "depths").iterdir():
        path.rename(path.with_name(f"other_{path.name}"))
    with pytest.raises(UserError, match="no depth map belongs to a photograph"):
        load(root, depths="depths")
    assert not load(root)[0].maps
    assert not load(root, depths="none")[0].maps


COLUMNS = {"depth": slice(0, 2)}


def strip(camera, blended: torch.Tensor, rows: slice, halo: int, counted=None) -> ImageStrip:
    """A strip of a photograph without texture; blended: (H, W, 2)."""
    shown = slice(max(0, rows.start - halo), min(camera.height, rows.stop + halo))
    here = slice(rows.start - shown.start, rows.stop - shown.start)
    photograph = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    if counted is not None:
        photograph = torch.cat([photograph, 255 * counted[..., None].to(torch.uint8)], dim=-1)
    view = TrainingView(camera, photograph, feature_columns=COLUMNS)
    rows = Rows(shown.start, shown.stop)
    return ImageStrip(view, rows, here, {"features": blended[shown]})


def test_the_term_is_a_mean_error_in_strips_as_in_the_whole(room):
    camera = room.cameras[0]
    rng = torch.Generator().manual_seed(0)
    size = camera.height, camera.width
    truth = torch.rand(size, generator=rng) + 1
    truth[:5] = 0
    inverse = torch.rand(size, generator=rng) + 0.2
    blended = torch.stack([inverse, inverse.square() * 1.1], dim=-1).requires_grad_(True)
    term = depth_term(KnownDepths({camera.name: DepthMap(Path(), truth)}), 1.0)
    whole = term.value(strip(camera, blended, slice(0, camera.height), 0))
    errors = depth_errors(blended.double(), truth.double()).float()
    assert torch.allclose(whole, errors[5:].mean())
    parts = [slice(0, 20), slice(20, 33), slice(33, camera.height)]
    values = [term.value(strip(camera, blended, rows, 5)) for rows in parts]
    assert torch.allclose(sum(values), whole)
    (d_whole,) = torch.autograd.grad(whole, blended)
    (d_parts,) = torch.autograd.grad(sum(values), blended)
    assert torch.allclose(d_whole, d_parts)
    counted = torch.rand(size, generator=rng) < 0.5
    masked = term.value(strip(camera, blended, slice(0, camera.height), 0, counted))
    assert torch.allclose(masked, errors[counted & (truth > 0)].mean())
    unknown = replace(camera, name="another")
    assert term.value(strip(unknown, blended, slice(0, camera.height), 0)).item() == 0


def test_errors_are_those_of_each_gaussian_of_a_pixel():
    depth = torch.tensor(2.0)
    # Two Gaussians before and behind the surface, whose mean reciprocal is right.
    depths = torch.tensor([1 / 0.45, 1 / 0.55])
    weights = torch.tensor([0.5, 0.5])
    blended = torch.stack([(weights / depths).sum(), (weights / depths**2).sum()])
    mean_square = (weights * (depth / depths - 1) ** 2).sum()
    expected = DEPTH_NOISE * ((1 + mean_square / DEPTH_NOISE**2).sqrt() - 1)
    assert float(depth_errors(blended, depth)) == pytest.approx(float(expected), rel=1e-4)
    assert float(depth_errors(torch.tensor([0.5, 0.25]), depth)) == 0
    # Where nothing is, an error of 1; large errors count by their amount.
    assert float(depth_errors(torch.zeros(2), depth)) == pytest.approx(1, rel=0.15)


def test_maps_count_where_photographs_have_no_texture():
    photograph = torch.full((40, 60, 3), 128, dtype=torch.uint8)
    photograph[:, 30:] = torch.randint(0, 255, (40, 30, 1), dtype=torch.uint8)
    weights = texture_weights(photograph)
    assert bool((weights[:, :26] == 1).all())
    assert float(weights[:, 34:].max()) < 0.05
    stripes = torch.full((20, 20, 3), 100, dtype=torch.uint8)
    stripes[::2] += round(2 * TEXTURE)
    assert float(texture_weights(stripes)[10, 10]) == pytest.approx(0.5, abs=0.02)


def test_blended_reciprocals_have_the_gradient_of_finite_differences(room):
    camera = room.cameras[0]
    rng = torch.Generator().manual_seed(1)
    means = torch.rand(40, 3, generator=rng) * torch.tensor([2.0, 1.0, 1.0]) - 0.5
    cloud = tiny_cloud(40)
    truth = torch.full((camera.height, camera.width), 2.0)
    term = depth_term(KnownDepths({camera.name: DepthMap(Path(), truth)}), 1.0)

    def loss(moved: torch.Tensor, backward: bool = False) -> float:
        leaves = replace(cloud, means=moved).activate().as_leaves()
        projection = project(leaves, camera, features=inverse_depths(leaves, camera))
        photograph = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
        view = TrainingView(camera, photograph, feature_columns=COLUMNS)
        found, _ = ViewPass(projection, view, ImageSplit()).backpropagate([term])
        return leaves.means.grad if backward else float(found["depth"])

    gradient = loss(means, backward=True)
    direction = torch.nn.functional.normalize(gradient, dim=None)
    step = 1e-3 * direction
    measured = (loss(means + step) - loss(means - step)) / 2e-3
    assert measured == pytest.approx(float((gradient * direction).sum()), rel=0.03)


def run(root: Path, model: Path, iterations: int = 12, **flags) -> Path:
    options = VanillaOptions(
        source_path=root,
        model_path=model,
        config=VanillaConfig(iterations=iterations),
        view_options=ViewOptions(min_observations=0),
        checkpoint_interval=6,
        test_iterations=(),
        **flags,
    )
    return run_stage(options)


@pytest.mark.slow
def test_a_run_with_depth_maps_resumes_with_the_same_bits(room, tmp_path, monkeypatch):
    root = with_depths(room, tmp_path / "scene", sensor)
    whole = run(root, tmp_path / "whole").read_bytes()
    assert run(root, tmp_path / "none", depth_options=DepthOptions("none")).read_bytes() != whole
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for path in (tmp_path / "cut").rglob("*12*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert run(root, tmp_path / "cut").read_bytes() == whole
    save(root / "depths" / "view_00.png", 1 + np.asarray(Image.open(root / "depths/view_00.png")))
    with pytest.raises(UserError, match="depth maps"):
        run(root, tmp_path / "whole")


def test_scenes_without_depth_maps_have_none(tmp_path):
    scene = make_tiny_scene(tmp_path / "scene")
    assert not load(scene.root)[0].maps
