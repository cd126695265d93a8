# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose checksums are right and whose content is not counts as a damaged one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from gaussian_splatting.components.densification import Densification
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.engine.checkpoint import CheckpointStore, checkpoint_path, load_payload
from gaussian_splatting.engine.model import TrainableCloud, check_free_payload, count_gaussians
from gaussian_splatting.engine.state_schema import payload_check
from gaussian_splatting.optim.schedule import LearningRates
from sugar_scene.bound_model import TrainableBoundCloud, check_bound_payload
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers.neighbor_search import NeighborSearch
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import tiny_cloud

N = 6


def stepped(model) -> dict:
    """Return the payload of a model that made a step."""
    for parameter in model.optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    model.optimizer.step()
    return model.state()


def free_payload() -> dict:
    cloud = GaussianCloud(*(t[:N] for t in tiny_cloud().tensors().values()))
    stage = {
        "gradient_sum": torch.zeros(N),
        "views": torch.zeros(N),
        "neighbors": torch.zeros(N, 4, dtype=torch.int32),
    }
    return {
        **stepped(TrainableCloud(cloud, LearningRates(), 1.0)),
        "train_losses": [0.5],
        "epoch": 1,
        "iteration": 4,
        "resume": {"settings": {"a": {"b": [1, None]}}, "inputs": {}, "stage": stage},
    }


def bound_payload() -> dict:
    mesh = icosahedron()
    vertices, faces = torch.tensor(mesh.vertices).float(), torch.tensor(mesh.faces)
    cloud = bind_to_mesh(vertices, faces, torch.rand(len(vertices), 3), 3, 1.0)
    rest = {"train_losses": [], "epoch": 1, "iteration": 4}
    state = stepped(TrainableBoundCloud(cloud, LearningRates(), 1.0))
    return {**state, **rest, "resume": {"settings": {}, "stage": {}}}


def at(*path: object, value: object) -> Callable[[dict], None]:
    def spoil(payload: dict) -> None:
        holder = payload
        for step in path[:-1]:
            holder = holder[step]
        found = holder.get(path[-1]) if isinstance(holder, dict) else holder[path[-1]]
        holder[path[-1]] = value(found) if callable(value) else value

    return spoil


def without(*path: object) -> Callable[[dict], None]:
    def spoil(payload: dict) -> None:
        holder = payload
        for step in path[:-1]:
            holder = holder[step]
        del holder[path[-1]]

    return spoil


STATE, ADAM, STAGE = "state_dict", "optimizer_state_dict", ("resume", "stage")
MOMENTS = (ADAM, "state", 0)
FREE = {
    "state is a list": at(STATE, value=[]),
    "state of numbers": at(STATE, "_points", value=3),
    "points of integers": at(STATE, "_points", value=lambda t: t.long()),
    "complex points": at(STATE, "_points", value=lambda t: t.to(torch.complex64)),
    "sparse points": at(STATE, "_points", value=lambda t: t.to_sparse()),
    "fewer points": at(STATE, "_points", value=lambda t: t[1:]),
    "flat points": at(STATE, "_points", value=lambda t: t.flatten()),
    "two bands": at(STATE, "_sh_coordinates_rest", value=lambda t: t[:, :2]),
    "NaN": at(STATE, "_scales", value=lambda t: t * torch.nan),
    "a number as quaternions": at(STATE, "_quaternions", value=torch.zeros(())),
    "no Gaussians": lambda payload: payload[STATE].update(
        {name: tensor[:0] for name, tensor in payload[STATE].items()}
    ),
    "a tensor for the model": at(STATE, value=torch.zeros(0)),
    "a tensor for Adam": at(ADAM, value=torch.zeros(2)),
    "epoch of text": at("epoch", value="3"),
    "epoch of True": at("epoch", value=True),
    "negative iteration": at("iteration", value=-4),
    "huge iteration": at("iteration", value=10**400),
    "iteration of a list": at("iteration", value=(1, 2)),
    "losses of a number": at("train_losses", value=7),
    "losses of text": at("train_losses", value=["a"]),
    "losses of a tensor": at("train_losses", value=torch.zeros(3)),
    "Adam is text": at(ADAM, value="adam"),
    "groups of numbers": at(ADAM, "param_groups", value=[1, 2]),
    "groups gone": without(ADAM, "param_groups"),
    "a group gone": without(ADAM, "param_groups", 2),
    "a rate of text": at(ADAM, "param_groups", 1, "lr", value="fast"),
    "another name": at(ADAM, "param_groups", 1, "name", value="colour"),
    "another parameter": at(ADAM, "param_groups", 1, "params", value=[0]),
    "moments of no parameter": at(ADAM, "state", 17, value={"step": 1}),
    "moments of a list": at(*MOMENTS, value=[]),
    "moments of rows less": at(*MOMENTS, "exp_avg", value=lambda t: t[1:]),
    "moments of None but a number": at(*MOMENTS, "exp_avg_sq", value=0.5),
    "negative squares": at(*MOMENTS, "exp_avg_sq", value=lambda t: -1 - t),
    "infinite moments": at(*MOMENTS, "exp_avg", value=lambda t: t + torch.inf),
    "steps of text": at(*MOMENTS, "step", value="many"),
    "steps of NaN": at(*MOMENTS, "step", value=torch.tensor(float("nan"))),
    "negative steps": at(*MOMENTS, "step", value=-1),
    "steps of each row": at(*MOMENTS, "step", value=torch.ones(N)),
    "resume is a number": at("resume", value=3),
    "settings are a list": at("resume", "settings", value=[1]),
    "settings of tensors": at("resume", "settings", "a", value=torch.zeros(2)),
    "settings of numbers by numbers": at("resume", "settings", "a", value={1: 2}),
    "stage of numbers": at(*STAGE, "views", value=3),
    "statistics of others": at(*STAGE, "gradient_sum", value=torch.zeros(N + 1)),
    "negative views": at(*STAGE, "views", value=torch.full((N,), -1.0)),
    "half of the statistics": without(*STAGE, "views"),
    "neighbours of others": at(*STAGE, "neighbors", value=lambda t: t[1:]),
    "neighbours that are not there": at(*STAGE, "neighbors", value=lambda t: t + N),
    "neighbours of floats": at(*STAGE, "neighbors", value=lambda t: t.float()),
}
BOUND = {
    "faces of floats": at(STATE, "_surface_mesh_faces", value=lambda t: t.float()),
    "faces of four": at(STATE, "_surface_mesh_faces", value=lambda t: t.repeat(1, 2)[:, :4]),
    "no faces": at(STATE, "_surface_mesh_faces", value=lambda t: t[:0]),
    "vertices that are not there": at(STATE, "_surface_mesh_faces", value=lambda t: t + 1),
    "thickness of each": at(STATE, "surface_mesh_thickness", value=torch.ones(4)),
    "negative thickness": at(STATE, "surface_mesh_thickness", value=torch.tensor(-1.0)),
    "sizes of free Gaussians": at(STATE, "_scales", value=lambda t: t.repeat(1, 2)[:, :3]),
}
RULES = (*Densification.schema, *NeighborSearch.schema)
CHECKS = {
    free_payload: payload_check(check_free_payload, count_gaussians, RULES),
    bound_payload: payload_check(check_bound_payload, count_gaussians, ()),
}
SPOILED = [
    *((free_payload, spoil) for spoil in FREE.values()),
    *((bound_payload, spoil) for spoil in BOUND.values()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "spoil"), SPOILED, ids=[*FREE, *BOUND])
def test_the_checkpoint_before_is_used(tmp_path, make, spoil):
    store = CheckpointStore(tmp_path, check=CHECKS[make])
    store.save(2, {**make(), "iteration": 2})
    payload = copy.deepcopy(make())
    spoil(payload)
    torch.save(payload, checkpoint_path(store.directory, 4))
    said: list[str] = []
    path, _ = store.latest_valid(said.append)
    assert path == checkpoint_path(store.directory, 2)
    assert len(said) == 1
    assert "4.pt: the checkpoint makes no sense (" in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize("make", [free_payload, bound_payload])
def test_what_stages_write_makes_sense(tmp_path, make):
    path = CheckpointStore(tmp_path).save(4, make())
    assert load_payload(path, CHECKS[make])["iteration"] == 4


def test_a_file_with_more_in_it_than_needed_makes_sense(tmp_path):
    payload = free_payload()
    payload["by"] = {"unknown": [1]}
    payload[STATE]["_more"] = torch.zeros(3)
    payload[ADAM]["param_groups"][0]["more"] = None
    torch.save(payload, tmp_path / "4.pt")
    assert load_payload(tmp_path / "4.pt")["by"] == {"unknown": [1]}


def test_a_model_without_an_optimiser_is_a_model_but_nothing_to_continue(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(4, {**free_payload(), ADAM: {}})
    assert load_payload(path)[ADAM] == {}
    said: list[str] = []
    assert store.latest_valid(said.append) is None
    assert "no data to resume from" in said[0]


@pytest.mark.parametrize("content", [3, [], torch.zeros(2), {"a": 1}, None])
def test_a_file_of_something_else_is_named(tmp_path, content):
    torch.save(content, tmp_path / "4.pt")
    with pytest.raises(UserError, match=r"4\.pt: not a training checkpoint"):
        load_payload(tmp_path / "4.pt")
