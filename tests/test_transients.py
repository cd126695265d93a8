# SPDX-License-Identifier: Apache-2.0
"""Regions that single photographs show and all others do not are found, and left out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting import train as vanilla_train
from gaussian_splatting.components.transient_regions import find_transients
from gaussian_splatting.components.transients import KEY, Transients, search_iterations
from gaussian_splatting.components.view_residuals import compared
from gaussian_splatting.data.images import decode_mask
from gaussian_splatting.engine.training_views import TrainingView, composited_view
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from gaussian_splatting.scenes.scene import VanillaSize, load_scene_for_checkpoint
from sugar_pipeline.pipeline.pipeline_result import training_record
from tests.support.launches import counting
from tests.support.pretend_device import GPU, pretend_gpu
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

N_VIEWS = 24
OCCLUDED = "view_05.png"
ALL_OCCLUDED = (OCCLUDED, "view_16.png")
ROWS = slice(14, 34)
COLUMNS = slice(26, 42)
REACH = 8  # pixels by which a mask may be larger: residuals are smoothed, and it has a margin
GREEN = (20, 250, 60)
FAINT = 45  # of 255, which leaves residuals below those that are beyond doubt


def photographs(occluded: bool) -> dict[str, torch.Tensor]:
    """Photographs of the tiny scene, one in another exposure, one with something in front."""
    images = {}
    for camera in tiny_cameras(N_VIEWS):
        pixels = render_8_bit(tiny_cloud(), camera).copy()
        if camera.name == "view_09.png":
            pixels = (pixels * 0.6 + 20).astype(np.uint8)
        if occluded and camera.name in ALL_OCCLUDED:
            pixels[ROWS, COLUMNS] = GREEN
        images[camera.name] = torch.from_numpy(pixels)
    return images


def found(images: dict[str, torch.Tensor], earlier=None) -> dict[str, np.ndarray]:
    """Transient regions of photographs, by a model that is not quite right."""

    def compare(gaussians, camera):
        return compared(gaussians, camera, images[camera.name], white=False, sh_degree=0)

    gaussians = disturbed_cloud(tiny_cloud()).activate()
    return dict(find_transients(gaussians, tiny_cameras(N_VIEWS), compare, earlier or {}))


@pytest.mark.slow
def test_what_stands_in_front_is_found_there_and_nowhere_else():
    masks = found(photographs(occluded=True))
    assert tuple(masks) == ALL_OCCLUDED
    inside = np.zeros((48, 64), bool)
    inside[ROWS, COLUMNS] = True
    near = np.zeros_like(inside)
    near[ROWS.start - REACH : ROWS.stop + REACH, COLUMNS.start - REACH : COLUMNS.stop + REACH] = 1
    for mask in masks.values():
        assert (mask & inside).sum() > 0.8 * inside.sum()
        assert not (mask & ~near).any()
    assert found(photographs(occluded=True), masks).keys() == masks.keys()


def test_nothing_is_found_where_nothing_moves():
    assert found(photographs(occluded=False)) == {}


def test_one_view_of_many_is_not_enough():
    images = photographs(occluded=True)
    images[ALL_OCCLUDED[1]] = photographs(occluded=False)[ALL_OCCLUDED[1]]
    assert found(images) == {}


@pytest.mark.parametrize(("n_faint", "are_found"), [(3, False), (6, True)])
def test_what_is_faint_is_found_where_a_fifth_of_the_views_have_some(n_faint, are_found):
    images = photographs(occluded=False)
    names = [camera.name for camera in tiny_cameras(N_VIEWS)][1 :: N_VIEWS // n_faint]
    for name in names:
        region = images[name][ROWS, COLUMNS].int()
        images[name][ROWS, COLUMNS] = (region + FAINT).clamp(0, 255).to(torch.uint8)
    masks = found(images)
    assert set(masks) <= set(names)
    assert len(masks) >= (5 if are_found else 0)
    assert bool(masks) == are_found


def test_a_region_is_given_up_when_it_fits():
    mask = np.zeros((48, 64), bool)
    mask[ROWS, COLUMNS] = True
    assert found(photographs(occluded=False), {OCCLUDED: mask}) == {}


def test_masked_pixels_have_weight_zero_at_any_size_and_keep_other_masks():
    component = Transients((), 0, N_VIEWS)
    mask = np.zeros((6, 8), bool)
    mask[2:4, 2:4] = True
    component.masks = {OCCLUDED: mask}
    camera = tiny_cameras(N_VIEWS)[5]
    plain = torch.full((48, 64, 3), 9, dtype=torch.uint8)
    view = component.before_view(TrainingView(camera, plain))
    weights = composited_view(view, torch.zeros(3), 0).target[..., 3]
    assert not weights[18:30, 18:30].any()
    assert (weights[:12] == 255).all()
    assert (weights[36:] == 255).all()
    masked = torch.cat([plain, torch.zeros(48, 64, 1, dtype=torch.uint8)], dim=2)
    masked[40:, :, 3] = 255
    view = component.before_view(TrainingView(camera, masked))
    assert torch.equal(view.target[..., 3] > 0, masked[..., 3] > 0)
    other = replace(camera, name="view_06.png")
    assert component.before_view(TrainingView(other, plain)).target is plain


def test_the_host_does_not_wait_to_send_a_mask():
    component = Transients((), 0, N_VIEWS)
    component.masks = {OCCLUDED: np.ones((6, 8), bool)}
    camera = tiny_cameras(N_VIEWS)[5]
    with pretend_gpu(), counting() as counts:
        plain = torch.full((48, 64, 3), 9, dtype=torch.uint8, device=GPU)
        view = component.before_view(TrainingView(camera, plain))
    assert view.target.shape[-1] == 4
    assert not counts.waits


def test_searches_begin_before_densification_and_end_before_the_run():
    assert sorted(search_iterations(7_000, 500, 100)) == [500, 1_000, 2_000, 4_000]
    assert min(search_iterations(30_000, 2_000, 100)) == 2_000
    assert max(search_iterations(1_000, 50, 100)) <= 650
    # Every photograph has been trained on once before.
    assert sorted(search_iterations(7_000, 500, 3_000)) == [3_000]
    assert not search_iterations(3_000, 500, 3_000)


def run(scene: Path, folder: Path, *flags: object) -> int:
    return run_cli(
        vanilla_train.main,
        "--transients",
        *flags,
        s=scene,
        m=folder,
        iterations=300,
        checkpoint_interval=100,
        densify_from_iter=60,
        keep_views="all",
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    tiny = make_tiny_scene(tmp_path_factory.mktemp("transients") / "scene", n_views=N_VIEWS)
    return tiny.root


@pytest.fixture(scope="module")
def occluded_scene(scene, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("occluded") / "scene"
    shutil.copytree(scene, target)
    for name in ALL_OCCLUDED:
        path = target / "images" / name
        pixels = np.asarray(Image.open(path).convert("RGB")).copy()
        pixels[ROWS, COLUMNS] = GREEN
        Image.fromarray(pixels).save(path)
    return target


@pytest.fixture(scope="module")
def trained(occluded_scene, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    assert run(occluded_scene, folder) == 0
    return folder


@pytest.mark.slow
def test_masks_lie_beside_the_gaussians_and_reach_later_stages(trained, occluded_scene):
    folder = trained / "point_cloud" / "iteration_300" / "transient_masks"
    assert sorted(path.stem for path in folder.iterdir()) == list(ALL_OCCLUDED)
    lines: list[str] = []
    later = load_scene_for_checkpoint(
        occluded_scene,
        load_reference_checkpoint(trained, 300),
        size_rule=VanillaSize(),
        eval_split=False,
        notify=lines.append,
    )
    masked = {c.name: c.mask for c in later.train_cameras if c.mask is not None}
    assert tuple(masked) == ALL_OCCLUDED
    assert masked[OCCLUDED].mode == "ignore"
    values = decode_mask(masked[OCCLUDED], 64, 48)
    assert values[18:30, 30:38].max() == 0
    assert values[:, :10].min() == 255
    assert any("transient" in line for line in lines)
    log = (trained / "checkpoints" / "log.txt").read_text()
    share = training_record("vanilla", trained / "checkpoints", ()).transient_share
    assert share is not None
    assert 0.005 < share < 0.05
    assert "left out what moved or stood in front in 2 of 24 photographs" in log


def test_resume_equals_uninterrupted_with_masks(trained, occluded_scene, tmp_path):
    whole = trained / "checkpoints"
    assert f"{KEY}{OCCLUDED}" in load_pt(whole / "200.pt")["resume"]["stage"]
    shutil.copytree(trained, tmp_path / "again")
    again = tmp_path / "again" / "checkpoints"
    for iteration in (100, 300):
        (again / f"{iteration}.pt").unlink()
    shutil.rmtree(tmp_path / "again" / "point_cloud")
    assert run(occluded_scene, tmp_path / "again", "--resume", again / "200.pt") == 0
    assert_same_bits(whole / "300.pt", again / "300.pt")
    name = Path("point_cloud") / "iteration_300" / "transient_masks" / f"{OCCLUDED}.png"
    assert (trained / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.slow
def test_where_nothing_moves_the_bits_are_those_of_a_run_without_a_search(scene, tmp_path):
    assert run(scene, tmp_path / "with") == 0
    assert run(scene, tmp_path / "without", "--transients", "False") == 0
    clouds = [
        tmp_path / name / "point_cloud" / "iteration_300" / "point_cloud.ply"
        for name in ("with", "without")
    ]
    assert clouds[0].read_bytes() == clouds[1].read_bytes()
    assert not clouds[0].with_name("transient_masks").exists()
