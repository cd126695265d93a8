# SPDX-License-Identifier: Apache-2.0
"""The refined model keeps Gaussians for what the mesh does not show."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_refined
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.engine.checkpoint import load_payload, save_payload
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_extractors.export.reading import read_bound_gaussians
from sugar_scene.bound_model import (
    TrainableBoundCloud,
    bound_cloud_from_state,
    check_bound_payload,
    state_with_background,
)
from sugar_scene.mesh_bound import BACKGROUND, BoundCloud, bind_to_mesh
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.initial_colors import background_rows
from sugar_trainers.refine_stage import (
    LARGEST_AT_BORDERS,
    LARGEST_BESIDE,
    RefineStage,
    largest_at_borders,
)
from sugar_trainers.stage_config import RefineConfig
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import icosahedron
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import (
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
    tiny_cloud,
)
from tests.support.verbs import export

SQUARE = torch.tensor([[-1.0, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]])
TWO_FACES = torch.tensor([[0, 1, 2], [0, 2, 3]])
STEPS = 6


def round_gaussians(means: list[list[float]], size: float) -> GaussianCloud:
    n = len(means)
    quats = torch.tensor([[1.0, 0, 0, 0]]).repeat(n, 1)
    return GaussianCloud(
        torch.tensor(means),
        torch.ones(n, 1, 3),
        torch.zeros(n, 15, 3),
        torch.full((n, 1), 3.0),
        torch.full((n, 3), math.log(size)),
        quats,
    )


def test_the_background_is_what_blends_beside_the_mesh():
    cameras = [look_at((x, 0.2, 4.0)) for x in (-1.0, 0.0, 1.0)]
    on_mesh, sky, behind, at_the_edge = [0.2, 0.1, 0.0], [2.2, 0, -1.0], [0, 0, -0.5], [1.05, 0, 0]
    cloud = round_gaussians([on_mesh, sky, behind, at_the_edge], 0.08)
    kept = background_rows(cloud.activate(), SQUARE, TWO_FACES, cameras)
    assert kept.tolist() == [False, True, False, True]


def test_without_a_mesh_in_sight_everything_is_background():
    camera = look_at((0.0, 0.2, 4.0))
    cloud = round_gaussians([[0.2, 0.1, 0.0], [0, 0, 9.0]], 0.08)
    kept = background_rows(cloud.activate(), SQUARE + 100, TWO_FACES, [camera])
    assert kept.tolist() == [True, False]  # the second is behind the camera


def bound(background: bool = True) -> BoundCloud:
    ball = icosahedron()
    vertices, faces = torch.tensor(ball.vertices).float(), torch.tensor(ball.faces)
    cloud = bind_to_mesh(vertices, faces, torch.rand(len(vertices), 3), 3, 1.0)
    return replace(cloud, background=tiny_cloud() if background else None)


def stepped(cloud: BoundCloud, config: OptimizerConfig | None = None) -> TrainableBoundCloud:
    model = TrainableBoundCloud(cloud, LearningRates(), 1.0, config or OptimizerConfig())
    for parameter in model.optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    model.optimizer.step()
    return model


def test_other_readers_find_what_they_find_without_a_background():
    plain, whole = (stepped(bound(kept)).state() for kept in (False, True))
    assert list(whole["state_dict"]) == list(plain["state_dict"])
    for name, tensor in plain["state_dict"].items():
        assert whole["state_dict"][name].shape == tensor.shape, name
    own, more = plain["optimizer_state_dict"], whole["optimizer_state_dict"]
    assert more["param_groups"] == own["param_groups"]
    assert list(more["state"]) == list(own["state"])
    assert BACKGROUND not in plain


@pytest.mark.parametrize("optimizer", [OptimizerConfig(), OptimizerConfig("bf16", True)])
def test_what_was_saved_is_restored(tmp_path, optimizer):
    model = stepped(bound(), optimizer)
    payload = {"train_losses": [], "epoch": 0, "iteration": 1, **model.state()}
    save_payload(tmp_path / "1.pt", payload)
    other = TrainableBoundCloud(bound(), LearningRates(), 1.0, optimizer)
    other.restore(load_payload(tmp_path / "1.pt"))
    for name, value in model.optimizer.parameters.items():
        assert torch.equal(value, other.optimizer.parameters[name]), name
    found = other.optimizer.moments()
    for name, moments in model.optimizer.moments().items():
        for moment, value in moments.items():
            assert torch.equal(value, found[name][moment]), (name, moment)


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_of_another_choice_is_refused(kept):
    model = TrainableBoundCloud(bound(kept), LearningRates(), 1.0)
    with pytest.raises(UserError, match="--keep_background"):
        model.restore(stepped(bound(not kept)).state())


@pytest.mark.parametrize("change", ["NaN", "shape", "missing"])
def test_a_damaged_background_is_one_line(tmp_path, change):
    payload = {"train_losses": [], "epoch": 0, "iteration": 1, **stepped(bound()).state()}
    state = payload[BACKGROUND]["state_dict"]
    if change == "NaN":
        state["_points"][0, 0] = math.nan
    elif change == "shape":
        state["_scales"] = state["_scales"][:, :2]
    else:
        del payload[BACKGROUND]["state_dict"]
    save_payload(tmp_path / "1.pt", payload)
    with pytest.raises(UserError, match=r"1\.pt: the checkpoint makes no sense"):
        load_payload(tmp_path / "1.pt", check_bound_payload)


def test_gaussians_at_open_edges_stay_small():
    cloud = bind_to_mesh(SQUARE, TWO_FACES, torch.rand(4, 3), 1, 1.0)
    limit = largest_at_borders(cloud)
    expected = cloud.log_scales[:, :1] + math.log(LARGEST_AT_BORDERS)
    torch.testing.assert_close(limit, expected)
    ball = icosahedron()
    closed = bind_to_mesh(
        torch.tensor(ball.vertices).float(),
        torch.tensor(ball.faces),
        torch.rand(len(ball.vertices), 3),
        6,
        1.0,
    )
    assert bool(largest_at_borders(closed).isinf().all())


def test_the_background_grows_little():
    """Far Gaussians would cover views that they lie beside."""
    cloud = bound()
    stage = RefineStage(cloud, RefineConfig(), 1.0)
    sizes = stage.model.cloud.log_scales, stage.model.cloud.background.log_scales
    before = [size.detach().clone() for size in sizes]
    with torch.no_grad():
        for size in sizes:
            size[::2] += 1.0
            size[1::2] -= 1.0
    stage.begin(1)
    on_mesh, beside = (now - then for now, then in zip(sizes, before, strict=True))
    torch.testing.assert_close(on_mesh[::2], torch.ones_like(on_mesh[::2]))
    torch.testing.assert_close(beside[::2], torch.full_like(beside[::2], math.log(LARGEST_BESIDE)))
    torch.testing.assert_close(beside[1::2], -torch.ones_like(beside[1::2]))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("background")
    scene = make_tiny_scene(root / "scene")
    checkpoint = make_tiny_checkpoint(root / "vanilla", scene)
    mesh = root / "sugarmesh_3Dgs7000_level03_decim20.ply"
    ball = icosahedron()
    # Open, and smaller than what the photographs show.
    write_mesh_ply(mesh, replace(ball, vertices=0.3 * ball.vertices, faces=ball.faces[3:]))
    return "-s", scene.root, "-c", checkpoint, "-m", mesh


def refine(inputs, output, *flags) -> dict:
    words = (*inputs, "-o", output, "-g", 3, "-v", 1000, "-f", STEPS, *flags)
    assert run_cli(train_refined.main, *words) == 0
    (path,) = output.glob(f"*/{STEPS}.pt")
    return torch.load(path, weights_only=True)


def test_a_run_keeps_trains_and_exports_the_background(inputs, tmp_path, capsys):
    payload = refine(inputs, tmp_path, "--keep_background", True, "--verbose")
    cloud = bound_cloud_from_state(state_with_background(payload))
    n = len(cloud.background)
    assert n > 0
    assert f"background: {n:,} of" in capsys.readouterr().out
    (ply,) = tmp_path.glob("*.ply")
    exported = read_gaussian_ply(ply)
    assert len(exported) == len(cloud) == len(cloud.opacity_logits) + n
    torch.testing.assert_close(exported.means[-n:], cloud.background.means)
    start = read_gaussian_ply(next(inputs[3].glob("point_cloud/*/*.ply")))
    moved = torch.cdist(cloud.background.means, start.means).amin(dim=1)
    assert 0 < float(moved.max()) < 0.1


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(inputs, tmp_path):
    flags = ("--keep_background", True, "--checkpoint_interval", 2)
    expected = refine(inputs, tmp_path / "a", *flags)
    refine(inputs, tmp_path / "b", *flags)
    for path in (tmp_path / "b").glob("*/*.pt"):
        if path.stem != "2":
            path.unlink()
    found = refine(inputs, tmp_path / "b", *flags)
    for one, other in ((expected, found), (expected[BACKGROUND], found[BACKGROUND])):
        for name, tensor in one["state_dict"].items():
            assert torch.equal(tensor, other["state_dict"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ((), False),
        (("--preset", "fast"), True),
        (("--preset", "fast", "--keep_background", False), False),
        (("--preset", "fast", "--keep_background", "auto"), True),
    ],
)
def test_the_preset_decides_unless_it_is_said(inputs, tmp_path, flags, kept):
    assert (BACKGROUND in refine(inputs, tmp_path, *flags)) == kept


def test_a_bent_mesh_leaves_the_background_where_it_is(inputs, tmp_path):
    refine(inputs, tmp_path, "--keep_background", True)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    cloud = read_bound_gaussians(folder)
    edited = tmp_path / "edited.obj"
    lines = ["v {} {} {}".format(*(vertex + 1.0).tolist()) for vertex in cloud.vertices]
    lines += ["f {} {} {}".format(*(face + 1).tolist()) for face in cloud.faces]
    edited.write_text("\n".join(lines))
    target = tmp_path / "bent.ply"
    assert run_cli(export.main, folder, "--to", "ply", "-o", target, "--repose", edited) == 0
    found, start, n = read_gaussian_ply(target), cloud.to_gaussians(), len(cloud.background)
    torch.testing.assert_close(found.means[:-n], start.means[:-n] + 1.0, rtol=0, atol=1e-5)
    assert torch.equal(found.means[-n:], start.means[-n:])
    assert len(np.load(f"{target}.binding.npz")["triangle"]) == len(found) - n


def test_a_missing_coarse_model_is_one_line(inputs, tmp_path, capsys):
    words = (*inputs, "-o", tmp_path / "out", "--keep_background", True)
    message = refusal(
        capsys, train_refined.main, *words, "--coarse_model_path", tmp_path / "none.pt"
    )
    assert "none.pt" in message
    assert not (tmp_path / "out").exists()
