# SPDX-License-Identifier: Apache-2.0
"""Normal maps beside photographs: found, turned to camera axes, and trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.components.normal_supervision import (
    NAME,
    NormalSupervision,
    facing_normals,
    normal_term,
)
from gaussian_splatting.data.cameras import pixel_rays
from gaussian_splatting.data.maps.normal_maps import (
    KnownNormals,
    NormalMap,
    NormalOptions,
    decoded_normals,
    in_camera_axes,
    known_normals,
)
from gaussian_splatting.engine.strips import ImageSplit, ViewPass
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import project, rasterize
from sugar_utils.errors import UserError
from tests.support.tiny_scene import make_tiny_scene, tiny_cameras, tiny_cloud

COLUMNS = {NAME: slice(0, 3)}


def normals_of(camera, seed: int = 0) -> np.ndarray:
    """Normals of surfaces that face a camera, in its axes. (H, W, 3)"""
    rays = pixel_rays(camera, dtype=torch.float64, device="cpu").numpy()
    tilts = np.random.default_rng(seed).normal(size=rays.shape) * 0.4
    normals = tilts - rays / np.linalg.norm(rays, axis=-1, keepdims=True)
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    away = (normals * rays).sum(axis=-1) >= 0
    normals[away] *= -1
    return normals.reshape(camera.height, camera.width, 3)


def as_colors(normals: np.ndarray) -> np.ndarray:
    return np.rint(255 * (normals + 1) / 2).astype(np.uint8)


@pytest.fixture
def scene(tmp_path):
    return make_tiny_scene(tmp_path / "scene")


def write(scene, form: str, turn=(1, 1, 1)) -> None:
    folder = scene.root / "normals"
    folder.mkdir()
    for number, camera in enumerate(scene.cameras):
        normals = normals_of(camera, number) * turn
        path = folder / f"{Path(camera.name).stem}{'.npy' if form != 'colours' else '.png'}"
        if form == "colours":
            Image.fromarray(as_colors(normals)).save(path)
        elif form == "vectors":
            np.save(path, normals.astype(np.float32))
        else:
            np.save(path, ((normals + 1) / 2).astype(np.float16))


def load(scene, **options) -> tuple[KnownNormals, list[str]]:
    lines: list[str] = []
    cameras = scene.cameras
    return known_normals(cameras, scene.root, NormalOptions(**options), lines.append), lines


@pytest.mark.parametrize("form", ["colours", "vectors", "shares"])
@pytest.mark.parametrize("turn", [(1, 1, 1), (1, -1, -1)], ids=["camera axes", "OpenGL"])
def test_maps_of_all_kinds_become_normals_in_camera_axes(scene, form, turn):
    write(scene, form, turn)
    known, lines = load(scene)
    assert lines == [f"normal maps of {len(scene.cameras)} of {len(scene.cameras)} photographs"]
    camera = scene.cameras[2]
    found = known.of(camera, torch.device("cpu")).numpy()
    assert np.abs(found - normals_of(camera, 2)).max() < 0.02


def test_maps_whose_surfaces_face_away_are_named_and_left_out(scene):
    write(scene, "colours")
    camera = scene.cameras[1]
    # Neither kind of axes: to the left is right.
    turned = normals_of(camera, 1)[..., [2, 0, 1]]
    path = scene.root / "normals" / f"{Path(camera.name).stem}.png"
    Image.fromarray(as_colors(turned)).save(path)
    known, lines = load(scene)
    assert camera.name not in known.maps
    assert "left out 1 normal maps" in lines[1]
    assert camera.name in lines[1]


def test_vectors_without_direction_are_unknown():
    numbers = np.zeros((2, 3, 3), dtype=np.float32)
    numbers[0, 0] = [0, 0, -1]
    numbers[0, 1] = [np.nan, 0, 1]
    numbers[1, 2] = [0, -0.9, 0]
    normals = decoded_normals(numbers)
    assert normals[0, 0].tolist() == [0, 0, -1]
    assert normals[1, 2].tolist() == [0, -1, 0]
    assert np.abs(normals).sum(axis=-1).astype(bool).sum() == 3
    assert in_camera_axes(np.zeros((6, 8, 3)), tiny_cameras(1)[0].resized(8, 6)) is not None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (np.ones((6, 8)), "not three channels"),
        (np.ones((5, 40, 3)), "another aspect ratio"),
        (b"no numbers", "cannot read the normal map"),
    ],
    ids=["one channel", "aspect", "text"],
)
def test_a_file_that_is_no_normal_map_is_one_line(scene, content, told):
    write(scene, "vectors")
    path = scene.root / "normals" / f"{Path(scene.cameras[0].name).stem}.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(UserError, match=told) as error:
        load(scene)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_are_found_named_or_none(scene):
    assert not load(scene)[0].maps
    with pytest.raises(UserError, match="--normals made: no such folder"):
        load(scene, normals="made")
    (scene.root / "made").mkdir()
    with pytest.raises(UserError, match="no normal map belongs to a photograph"):
        load(scene, normals="made")
    write(scene, "colours")
    assert load(scene, normals="normals")[0].maps
    assert not load(scene, normals="none")[0].maps
    assert not load(scene, normal_weight=0.0)[0].maps


def test_gaussians_face_the_camera():
    camera = tiny_cameras(1)[0]
    gaussians = tiny_cloud(60).activate()
    normals = facing_normals(gaussians, camera)
    rotation = torch.from_numpy(camera.rotation).float()
    centers = gaussians.means @ rotation.T + torch.from_numpy(camera.translation).float()
    assert bool(((normals * centers).sum(dim=1) <= 0).all())
    torch.testing.assert_close(normals.norm(dim=1), torch.ones(60))
    # Along the shortest axis nothing is wider.
    output = rasterize(gaussians, camera, rgb=False, normal=True)
    blended = rasterize(gaussians, camera, rgb=False, features=normals).features
    assert float((output.normal[..., :2] - blended[..., :2]).abs().max()) < 1e-4


def test_the_term_has_the_gradient_of_finite_differences():
    camera = tiny_cameras(1)[0]
    cloud = tiny_cloud(40)
    truth = torch.from_numpy(np.rint(127 * normals_of(camera)).astype(np.int8))
    known = KnownNormals({camera.name: NormalMap(Path(), truth)}, 1.0)
    photograph = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)

    def loss(quats: torch.Tensor, backward: bool = False) -> float:
        leaves = replace(cloud, quats=quats).activate().as_leaves()
        projection = project(leaves, camera, features=facing_normals(leaves, camera))
        view = TrainingView(camera, photograph, feature_columns=COLUMNS)
        found, _ = ViewPass(projection, view, ImageSplit()).backpropagate([normal_term(known)])
        return leaves.quats.grad if backward else float(found[NAME])

    quats = torch.nn.functional.normalize(cloud.quats.detach(), dim=1)
    gradient = loss(quats, backward=True)
    # Leaves are unit quaternions: only the part along the sphere moves them.
    gradient = gradient - quats * (gradient * quats).sum(dim=1, keepdim=True)
    step = 2e-3 * torch.nn.functional.normalize(gradient, dim=None)
    measured = (loss(quats + step) - loss(quats - step)) / 4e-3
    expected = float((gradient * step).sum()) / 2e-3
    assert measured == pytest.approx(expected, rel=0.05)


def test_nothing_is_said_of_views_without_a_map_and_of_texture():
    camera = tiny_cameras(1)[0]
    cloud = tiny_cloud(40)
    truth = torch.from_numpy(np.rint(127 * normals_of(camera)).astype(np.int8))
    known = KnownNormals({camera.name: NormalMap(Path(), truth)}, 1.0)
    component = NormalSupervision(known)

    def loss(camera, photograph) -> float:
        leaves = cloud.activate().as_leaves()
        view = component.before_view(TrainingView(camera, photograph, feature_columns=COLUMNS))
        (added,) = view.added
        projection = project(leaves, camera, features=added.features(leaves, camera))
        found, _ = ViewPass(projection, view, ImageSplit()).backpropagate(added.terms)
        return float(found[NAME])

    even = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    rng = torch.Generator().manual_seed(0)
    noisy = torch.randint(0, 255, even.shape, generator=rng, dtype=torch.uint8)
    assert loss(camera, even) > 0.1
    assert loss(camera, noisy) < 0.02 * loss(camera, even)
    assert loss(replace(camera, name="another"), even) == 0
