# SPDX-License-Identifier: Apache-2.0
"""Training views that the model contradicts are left out of the rest of the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting import train as vanilla_train
from gaussian_splatting.components.view_checks import contradicting_views
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from tests.support.tiny_scene import (
    assert_same_bits,
    disturbed_cloud,
    load_pt,
    make_tiny_scene,
    render_8_bit,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.training import everywhere

WRONG = "view_05.png"


def stage() -> VanillaStage:
    return VanillaStage(disturbed_cloud(tiny_cloud()), VanillaConfig(), everywhere(3.0), None)


def image_of(camera, wrong=()):
    shown = tiny_cameras(10)[0] if camera.name in wrong else camera
    if camera.name in wrong:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(
            0, 256, (camera.height, camera.width, 3), dtype=torch.uint8, generator=generator
        )
    return torch.from_numpy(render_8_bit(tiny_cloud(), shown))


def test_a_view_that_shows_something_else_is_named_and_no_other():
    cameras = tiny_cameras(10)
    assert contradicting_views(stage(), cameras, image_of, False) == {}
    found = contradicting_views(stage(), cameras, lambda c: image_of(c, (WRONG,)), False)
    assert list(found) == [WRONG]
    assert "the model cannot reproduce it" in found[WRONG]


def test_where_many_views_do_not_fit_the_model_is_at_fault():
    cameras = tiny_cameras(10)
    wrong = {camera.name for camera in cameras[:4]}
    assert contradicting_views(stage(), cameras, lambda c: image_of(c, wrong), False) == {}
    assert contradicting_views(stage(), cameras[:5], lambda c: image_of(c, (WRONG,)), False) == {}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    tiny = make_tiny_scene(tmp_path_factory.mktemp("residuals") / "scene", n_views=12)
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tiny.root / "images" / WRONG)
    return tiny.root


@pytest.mark.slow
def test_resume_equals_uninterrupted_when_a_view_is_left_out(scene, tmp_path, capsys):
    def run(folder, *flags):
        return run_cli(
            vanilla_train.main, *flags, s=scene, m=folder, iterations=120, checkpoint_interval=60
        )

    assert run(tmp_path / "a") == 0
    assert f"that contradict the rest: {WRONG} (the model cannot" in capsys.readouterr().out
    record = json.loads((tmp_path / "a" / "checkpoints" / "run.json").read_text())
    assert list(record["dropped_views"]) == [WRONG]
    assert record["held_out_views"] == []
    whole = tmp_path / "a" / "checkpoints"
    assert list(load_pt(whole / "60.pt")["resume"]["left_out_views"]) == [WRONG]
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "60.pt"):
        if (whole / name).is_file():
            (tmp_path / "b" / "checkpoints" / name).write_bytes((whole / name).read_bytes())
    assert run(tmp_path / "b", "--resume", tmp_path / "b" / "checkpoints" / "60.pt") == 0
    paths = [tmp_path / folder / "checkpoints" / "120.pt" for folder in "ab"]
    assert_same_bits(*paths)


@pytest.mark.slow
def test_views_that_are_asked_for_stay(scene, tmp_path, capsys):
    code = run_cli(
        vanilla_train.main, s=scene, m=tmp_path / "kept", iterations=40, keep_views=WRONG
    )
    assert code == 0
    record = json.loads((tmp_path / "kept" / "checkpoints" / "run.json").read_text())
    assert record["dropped_views"] == {}
