# SPDX-License-Identifier: Apache-2.0
"""Depth maps by estimators: their programs are stand-ins that degrade true depth as models do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, zoom

from gaussian_splatting.data.maps.estimators import metric3d
from gaussian_splatting.data.maps.estimators.metric3d import padded_photograph
from sugar_utils.errors import UserError
from tests.support.depth_scenes import load
from tests.support.room import Room, make_room

ERROR = 0.03  # relative, smooth over the image
METRES = 0.7  # of a unit of the scene
CELLS = 4  # of the smooth error, along each side


@pytest.fixture
def room(tmp_path) -> Room:
    return make_room(tmp_path / "scene", n_views=8, width=64, n_points=300)


class Eye:
    """Recognises photographs of a room, and estimates their depth."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.n_estimates = 0

    def depth(self, pixels: np.ndarray) -> np.ndarray:
        """Depth of the most similar photograph, in metres, with smooth errors and soft edges."""
        self.n_estimates += 1
        height, width = pixels.shape[:2]
        differences = {}
        for camera in self._room.cameras:
            own = Image.open(camera.image_path or self._room.root / "images" / camera.name)
            resized = np.asarray(own.convert("RGB").resize((width, height)), dtype=np.float64)
            differences[camera.name] = np.abs(resized - pixels).mean()
        name = min(differences, key=differences.__getitem__)
        depth = self._room.depths[name]
        rng = np.random.default_rng(sorted(differences).index(name))
        shape = depth.shape
        coarse = rng.normal(size=(CELLS, CELLS))
        smooth = zoom(coarse, (shape[0] / CELLS, shape[1] / CELLS), order=3)
        estimated = METRES * depth * (1 + ERROR * smooth)
        return (1 / gaussian_filter(1 / estimated, 0.7)).astype(np.float32)


class MogeModel:
    """Stands in for ``moge.model.v2.MoGeModel``: depth of tensors, infinite for the sky."""

    eye: Eye

    @classmethod
    def from_pretrained(cls, name: str) -> MogeModel:
        assert name == "Ruicheng/moge-2-vitl"
        return cls()

    def to(self, device: torch.device) -> MogeModel:
        return self

    def eval(self) -> MogeModel:
        return self

    def infer(self, image: torch.Tensor, *, fov_x: float, use_fp16: bool) -> dict:
        assert image.dim() == 3
        assert image.shape[0] == 3
        assert fov_x == pytest.approx(2 * np.degrees(np.arctan(0.5 / 0.8)))
        pixels = (255 * image.permute(1, 2, 0)).round().numpy()
        depth = torch.from_numpy(self.eye.depth(pixels))
        depth[:3] = torch.inf
        return {"depth": depth, "mask": depth.isfinite()}


class DepthAnything3(MogeModel):
    """Stands in for the class of that name: depths for a camera of 300 pixels, at another size."""

    @classmethod
    def from_pretrained(cls, name: str) -> DepthAnything3:
        assert name == "depth-anything/DA3METRIC-LARGE"
        return cls()

    def inference(self, images: list[np.ndarray]) -> SimpleNamespace:
        (pixels,) = images
        depth = self.eye.depth(pixels).repeat(2, axis=0).repeat(2, axis=1)
        focal = 0.8 * depth.shape[1]
        sky = np.zeros_like(depth)
        sky[:3] = 1
        return SimpleNamespace(depth=depth[None] * 300 / focal, sky=sky[None])


class Metric3d(MogeModel):
    """Stands in for the model of torch's hub: depths for a camera of 1,000 pixels, with padding."""

    def inference(self, batch: dict[str, torch.Tensor]) -> tuple:
        image = batch["input"]
        assert image.shape == (1, 3, metric3d.HEIGHT, metric3d.WIDTH)
        colors = image[0].permute(1, 2, 0).numpy() * metric3d.DEVIATION + metric3d.MEAN
        width = round(metric3d.HEIGHT * 4 / 3)
        left = (metric3d.WIDTH - width) // 2
        depth = self.eye.depth(colors[:, left : left + width])
        found = np.asarray(Image.fromarray(depth).resize((width, metric3d.HEIGHT)))
        whole = np.full((metric3d.HEIGHT, metric3d.WIDTH), 77, dtype=np.float32)
        whole[:, left : left + width] = found / (0.8 * width / 1000)
        return torch.from_numpy(whole)[None, None], None, {}


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


@pytest.fixture
def eye(room, monkeypatch) -> Eye:
    """All programs are installed, and look at the room."""
    eye = Eye(room)
    monkeypatch.setattr(MogeModel, "eye", eye, raising=False)
    for made in (
        module("moge"),
        module("moge.model"),
        module("moge.model.v2", MoGeModel=MogeModel),
        module("depth_anything_3"),
        module("depth_anything_3.api", DepthAnything3=DepthAnything3),
        module("mmengine"),
        module("timm"),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)

    def hub_load(source: str, name: str, *, pretrain: bool, trust_repo: bool) -> Metric3d:
        assert (source, name, pretrain) == ("yvanyin/metric3d", "metric3d_vit_large", True)
        return Metric3d()

    monkeypatch.setattr(torch.hub, "load", hub_load)
    return eye


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moge", "da3", "metric3d"])
def test_estimated_depths_are_those_of_the_scene(room, eye, name):
    known, lines = load(room.root, depths=name)
    assert set(known.maps) == {camera.name for camera in room.cameras}
    licences = {"moge": "(MIT)", "da3": "(Apache-2.0)", "metric3d": "(BSD-2-Clause)"}
    assert licences[name] in lines[0]
    assert "in one unit" in lines[1]
    errors = []
    for camera in room.cameras:
        depth = known.of(camera, torch.device("cpu")).numpy()
        if name != "metric3d":
            assert (depth[0] == 0).all(), "the sky has no depth"
        is_known = depth > 0
        ratio = depth[is_known] / room.depths[camera.name][is_known]
        errors.append(np.median(np.abs(ratio - 1)))
    assert max(errors) < 2.5 * ERROR
    assert np.median(errors) < ERROR


def test_maps_that_are_there_are_not_estimated_again(room, eye):
    load(room.root, depths="moge")
    assert eye.n_estimates == 8
    load(room.root, depths="moge")
    assert eye.n_estimates == 8
    (room.root / "depths_moge" / f"{room.cameras[3].name}.npy").unlink()
    load(room.root, depths="moge")
    assert eye.n_estimates == 9
    # And nothing is looked at where maps have no weight.
    load(room.root, depths="da3", depth_weight=0.0)
    assert eye.n_estimates == 9


@pytest.mark.parametrize("name", ["moge", "da3", "metric3d"])
def test_a_program_that_is_not_installed_is_one_line(room, name):
    with pytest.raises(UserError, match=f"--depths {name} needs the program .*install") as error:
        load(room.root, depths=name)
    assert "\n" not in str(error.value)
    assert not (room.root / f"depths_{name}").exists()


def failing(kind: type[Exception]) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise kind("no route to host\nin 3 attempts")

    return fail


def test_weights_that_do_not_load_are_one_line(room, eye, monkeypatch):
    monkeypatch.setattr(MogeModel, "from_pretrained", failing(OSError))
    with pytest.raises(UserError, match="cannot load Ruicheng/moge-2-vitl: no route") as error:
        load(room.root, depths="moge")
    assert "\n" not in str(error.value)


def test_a_photograph_that_fails_is_named_and_the_others_are_kept(room, eye, monkeypatch):
    infer = MogeModel.infer

    def infer_five(model: MogeModel, image: torch.Tensor, **how: object) -> dict:
        if eye.n_estimates == 5:
            raise RuntimeError("out of memory")
        return infer(model, image, **how)

    monkeypatch.setattr(MogeModel, "infer", infer_five)
    with pytest.raises(UserError, match=r"MoGe-2 failed at view_\d\d.png: out of memory"):
        load(room.root, depths="moge")
    assert len(list((room.root / "depths_moge").iterdir())) == 5


def test_photographs_are_padded_evenly_by_their_mean_colour():
    pixels = np.full((300, 400, 3), 200, dtype=np.uint8)
    padded = padded_photograph(pixels)
    assert padded.scale == pytest.approx(616 / 300)
    assert padded.rows == slice(0, 616)
    assert padded.columns == slice(121, 121 + 821)
    assert padded.image[0, 0, 0] == 0
    expected = (200 - metric3d.MEAN[0]) / metric3d.DEVIATION[0]
    assert padded.image[0, 300, 500] == pytest.approx(expected, rel=1e-6)
