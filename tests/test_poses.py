# SPDX-License-Identifier: Apache-2.0
"""Learned poses: gradients against finite differences, gauge, resuming, and a disturbed scene."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting import train as vanilla_train
from gaussian_splatting.components.poses import (
    PoseConfig,
    PoseRefinement,
    fitted_pose,
    pose_gradient,
    with_motion,
)
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.sh_rotation import rotation_generators
from gaussian_splatting.core.spherical_harmonics import sh_basis_of
from gaussian_splatting.data.colmap import read_colmap
from gaussian_splatting.data.names import ImageFolder
from gaussian_splatting.engine.reporting.run_report import last_value, read_curves
from gaussian_splatting.engine.reporting.view_findings import POSED
from gaussian_splatting.optim.visited_adam import rate_at
from gaussian_splatting.scenes.reference_layout import read_cameras_json
from sugar_utils.errors import UserError
from tests.support.command_line import as_flags
from tests.support.random_scenes import look_at
from tests.support.reference_rasterizer import rasterize_reference
from tests.support.tiny_scene import (
    load_pt,
    make_tiny_scene,
    render_8_bit,
    run_cli,
    tiny_cameras,
    tiny_cloud,
    write_model,
)

EXTENT = 2.5
VIEW = look_at((0.4, -3.5, 0.6), width=40, height=32, focal=38.0)
CAMERAS = [look_at((3 * np.cos(a), 3 * np.sin(a), 0.5), name=f"{a:.1f}") for a in range(5)]


def tame_gaussians(n: int = 40) -> Gaussians:
    """Gaussians away from every limit of the renderer, where its gradient is not the derivative."""
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return Gaussians(
        means=normal(n, 3) * 0.5,
        quats=torch.nn.functional.normalize(normal(n, 4), dim=-1),
        scales=torch.exp(normal(n, 3) * 0.3 - 1.5),
        opacities=0.1 + 0.4 * torch.rand(n, generator=rng, dtype=torch.float64),
        sh_dc=normal(n, 1, 3) * 0.2,
        sh_rest=normal(n, 15, 3) * 0.05,
    )


def test_generators_turn_colours_as_directions_turn():
    rng = torch.Generator().manual_seed(3)
    coefficients = torch.randn(15, 4, generator=rng, dtype=torch.float64)
    directions = torch.nn.functional.normalize(
        torch.randn(50, 3, generator=rng, dtype=torch.float64), dim=1
    )
    angle = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64)
    whole = torch.linalg.matrix_exp((rotation_generators() * angle[:, None, None]).sum(0))
    x, y, z = angle
    skew = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    turn = torch.linalg.matrix_exp(skew)
    turned = sh_basis_of(directions)[:, 1:] @ (whole @ coefficients)
    expected = sh_basis_of(directions @ turn)[:, 1:] @ coefficients
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-10)


def test_the_gradient_to_a_pose_is_that_of_finite_differences():
    gaussians = tame_gaussians()
    weights = torch.randn(32, 40, 3, generator=torch.Generator().manual_seed(5)).double()

    def loss_of(motion: torch.Tensor) -> float:
        image = rasterize_reference(gaussians, with_motion(VIEW, motion, EXTENT)).image
        return float((image * weights).sum())

    leaves = {
        name: getattr(gaussians, name).clone().requires_grad_()
        for name in ("means", "quats", "sh_rest")
    }
    image = rasterize_reference(replace(gaussians, **leaves), VIEW).image
    (image * weights).sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    found = pose_gradient(leaves, gradients, torch.from_numpy(VIEW.center))
    found[3:] *= EXTENT
    for entry in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[entry] = 1e-6
        numeric = (loss_of(step) - loss_of(-step)) / 2e-6
        assert float(found[entry]) == pytest.approx(numeric, rel=2e-4, abs=1e-3)


def test_a_motion_turns_about_the_centre_and_shifts_in_extents():
    motion = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2, 0.0], dtype=torch.float64)
    moved = with_motion(VIEW, motion, EXTENT)
    assert np.allclose(moved.center, VIEW.center + [0.0, 0.5, 0.0])
    assert np.allclose(moved.rotation @ moved.rotation.T, np.eye(3))
    cosine = (np.trace(moved.rotation @ VIEW.rotation.T) - 1) / 2
    assert np.arccos(cosine) == pytest.approx(0.1)
    still = with_motion(VIEW, torch.zeros(6, dtype=torch.float64), EXTENT)
    assert np.array_equal(still.rotation, VIEW.rotation)


def pulled(poses: PoseRefinement, rows: dict[int, float]) -> None:
    for row, pull in rows.items():
        poses.statistics()[0][row] += pull


def test_motions_have_no_mean_and_only_cameras_that_were_used_step():
    poses = PoseRefinement(CAMERAS, EXTENT, PoseConfig(start=1, last=10))
    pulled(poses, {0: 1.0, 3: -2.0})
    poses.after_step(1)
    assert torch.allclose(poses.motions.mean(dim=0), torch.zeros(6, dtype=torch.float64))
    assert poses.motions[0, 0] < 0 < poses.motions[3, 0]
    assert torch.equal(poses.motions[1], poses.motions[2])
    assert not poses.statistics()[0].any()


def test_the_rate_follows_from_how_often_a_run_shows_a_camera():
    def way(last: int, n_cameras: int, views: int = 1) -> float:
        config = PoseConfig.of_run(0, last, n_cameras, views)
        rates = [
            rate_at(config.rate, config.final_share, 0, last, i)
            for i in range(0, last, max(1, n_cameras // views))
        ]
        return sum(rates)

    assert way(4_000, 50) == pytest.approx(0.03, rel=0.03)
    assert way(4_000, 100, 2) == pytest.approx(0.03, rel=0.03)
    assert PoseConfig.of_run(0, 100, 50, 1).rate == 3e-3
    assert PoseConfig.of_run(0, 100_000, 10, 1).rate == 2e-4


def test_poses_wait_for_their_first_iteration():
    poses = PoseRefinement(CAMERAS, EXTENT, PoseConfig(start=5))
    pulled(poses, {1: 1.0})
    poses.after_step(4)
    assert not poses.motions.any()


def test_resumed_poses_go_on_with_the_same_bits():
    config = PoseConfig(start=1, last=10)
    whole = PoseRefinement(CAMERAS, EXTENT, config)
    first = PoseRefinement(CAMERAS, EXTENT, config)
    for iteration in range(1, 7):
        for poses in (whole, first):
            pulled(poses, {iteration % 5: 0.3 * iteration, 2: -1.0})
            poses.after_step(iteration)
        if iteration == 3:
            resumed = PoseRefinement(CAMERAS, EXTENT, config)
            resumed.load_state(first.state())
            first = resumed
    assert torch.equal(whole.motions, first.motions)


def test_poses_of_other_photographs_are_refused():
    poses = PoseRefinement(CAMERAS, EXTENT, PoseConfig())
    with pytest.raises(UserError, match="not those of 5 photographs"):
        poses.load_state(PoseRefinement(CAMERAS[:4], EXTENT, PoseConfig()).state())


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A scene whose model is wrong by about a degree and 3 % of its extent."""
    scene = make_tiny_scene(tmp_path_factory.mktemp("disturbed") / "scene")
    rng = torch.Generator().manual_seed(4)
    motions = 0.02 * torch.randn(len(scene.cameras), 6, generator=rng, dtype=torch.float64)
    motions -= motions.mean(dim=0)
    wrong = [with_motion(c, m, 3.0) for c, m in zip(scene.cameras, motions, strict=True)]
    write_model(scene.root / "sparse" / "0", wrong, scene.points, scene.points_rgb)
    return scene, wrong


def trained(scene, output, iterations: int, *more: object) -> None:
    words = (
        *as_flags(
            s=scene.root,
            m=output,
            iterations=iterations,
            refine_poses="True",
            densify_from_iter=iterations,
        ),
        *more,
    )
    assert run_cli(vanilla_train.main, *words) == 0


def pixels_off(cameras, truth, points: np.ndarray) -> float:
    """Mean distance of the points' projections from where they are, in pixels."""

    def projected(camera) -> np.ndarray:
        seen = points @ camera.rotation.T + camera.translation
        return seen[:, :2] / seen[:, 2:] * camera.fx

    pairs = zip(cameras, truth, strict=True)
    return float(np.mean([np.linalg.norm(projected(a) - projected(b), axis=1) for a, b in pairs]))


@pytest.mark.slow
def test_learned_poses_come_nearer_to_the_truth_and_are_written(disturbed, tmp_path, capsys):
    scene, wrong = disturbed
    trained(scene, tmp_path, 500)
    assert "poses moved by" in capsys.readouterr().out
    stored = read_cameras_json(tmp_path / "cameras.json")
    kept = {entry.camera.name: entry.camera for entry in stored}
    found = [kept[c.name] for c in scene.cameras]
    before = pixels_off(wrong, scene.cameras, scene.points)
    assert pixels_off(found, scene.cameras, scene.points) < 0.5 * before
    model = read_colmap(tmp_path / "sparse_refined" / "0", ImageFolder(scene.root / "images"))
    for camera in model.cameras:
        assert np.allclose(camera.rotation, kept[camera.name].rotation, atol=1e-9)
        assert np.allclose(camera.translation, kept[camera.name].translation, atol=1e-6)


@pytest.mark.parametrize("exposed", [False, True])
def test_a_held_out_view_is_moved_to_where_its_photograph_fits(exposed):
    gaussians, camera = tiny_cloud().activate(), tiny_cameras(3)[1]
    photograph = torch.from_numpy(render_8_bit(tiny_cloud(), camera))
    if exposed:
        photograph = (photograph * 0.7 + 20).to(torch.uint8)
    motion = torch.tensor([0.006, -0.004, 0.003, 0.004, 0.002, -0.006], dtype=torch.float64)
    wrong = with_motion(camera, motion, 3.0)
    found = fitted_pose(gaussians, wrong, photograph, 3.0, torch.zeros(3), exposed=exposed)
    points = gaussians.means.numpy()
    before = pixels_off([wrong], [camera], points)
    assert pixels_off([found], [camera], points) < 0.2 * before
    assert all(not tensor.requires_grad for tensor in gaussians.tensors())


def test_pixels_that_do_not_count_do_not_move_a_held_out_view():
    gaussians, camera = tiny_cloud().activate(), tiny_cameras(3)[1]
    photograph = render_8_bit(tiny_cloud(), camera)
    mask = np.full((*photograph.shape[:2], 1), 255, np.uint8)
    mask[:, :20] = 0
    found = []
    for hidden in (0, 255):
        painted = photograph.copy()
        painted[:, :20] = hidden
        both = torch.from_numpy(np.concatenate([painted, mask], axis=2))
        found.append(fitted_pose(gaussians, camera, both, 3.0, torch.zeros(3)))
    assert np.array_equal(found[0].rotation, found[1].rotation)
    assert np.array_equal(found[0].translation, found[1].translation)


def test_held_out_views_are_also_measured_in_the_poses_that_fit_best(disturbed, tmp_path, capsys):
    scene, _ = disturbed
    trained(scene, tmp_path, 60, "--eval", "--verbose")
    assert "of these in the poses that fit best, PSNR" in capsys.readouterr().out
    curves = read_curves(tmp_path / "checkpoints" / "tensorboard")
    assert last_value(curves, f"Test/{POSED}") > last_value(curves, "Test/PSNR")


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_poses(disturbed, tmp_path):
    scene, _ = disturbed
    trained(scene, tmp_path / "whole", 40, "--checkpoint_interval", 20)
    trained(scene, tmp_path / "parts", 40, "--checkpoint_interval", 20)
    folder = tmp_path / "parts" / "checkpoints"
    whole = load_pt(tmp_path / "whole" / "checkpoints" / "40.pt")["resume"]["stage"]
    (folder / "40.pt").unlink()
    trained(scene, tmp_path / "parts", 40, "--checkpoint_interval", 20)
    again = load_pt(folder / "40.pt")["resume"]["stage"]
    assert whole["pose_motions"].abs().max() > 0
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
