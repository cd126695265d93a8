# SPDX-License-Identifier: Apache-2.0
"""The optimiser whose rows come and go: Adam's numbers, and moments that stay with their rows."""

import copy
import json

import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.optim import adam
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.adam_steps import ADAM_EPS
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_utils.errors import UserError
from tests.support.golden import GOLDEN_DIR
from tests.support.random_scenes import random

RATES = {"a": 0.1, "b": 0.01}


class HandMadeAdam:
    """Adam of one tensor, from the paper (Kingma & Ba 2015, algorithm 1), in float64."""

    def __init__(self, value: torch.Tensor, rate: float) -> None:
        self.value, self.rate = value.double().clone(), rate
        self.m, self.v, self.t = torch.zeros_like(self.value), torch.zeros_like(self.value), 0

    def step(self, grad: torch.Tensor) -> None:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad.double()
        self.v = 0.999 * self.v + 0.001 * grad.double() ** 2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.value -= self.rate * m / (v.sqrt() + ADAM_EPS)


def make(n: int = 6) -> tuple[GroupedAdam, dict[str, HandMadeAdam]]:
    values = {"a": random(n, 3, seed=1), "b": random(n, 2, 2, seed=2)}
    by_hand = {name: HandMadeAdam(value, RATES[name]) for name, value in values.items()}
    return GroupedAdam(values, RATES), by_hand


def step(adam: GroupedAdam, by_hand: dict[str, HandMadeAdam], seed: int) -> None:
    for offset, (name, parameter) in enumerate(adam.parameters.items()):
        parameter.grad = random(*parameter.shape, seed=seed + offset)
        by_hand[name].step(parameter.grad)
    adam.step()


def assert_agree(adam: GroupedAdam, by_hand: dict[str, HandMadeAdam]) -> None:
    state = adam.state_dict()["state"]
    for index, (name, reference) in enumerate(by_hand.items()):
        torch.testing.assert_close(
            adam.parameters[name].detach().double(), reference.value, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(state[index]["exp_avg"].double(), reference.m, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            state[index]["exp_avg_sq"].double(), reference.v, atol=1e-6, rtol=0
        )
        assert float(state[index]["step"]) == reference.t


def test_steps_are_those_of_adam():
    adam, by_hand = make()
    for seed in (10, 20, 30):
        step(adam, by_hand, seed)
    assert_agree(adam, by_hand)


def test_kept_rows_keep_their_moments_and_the_step_count():
    adam, by_hand = make()
    step(adam, by_hand, 10)
    keep = torch.tensor([True, False, True, True, False, True])
    adam.keep_rows(keep)
    for reference in by_hand.values():
        reference.value, reference.m, reference.v = (
            tensor[keep] for tensor in (reference.value, reference.m, reference.v)
        )
    assert_agree(adam, by_hand)
    step(adam, by_hand, 40)
    assert_agree(adam, by_hand)


def test_appended_rows_start_with_zero_moments_and_the_others_stay():
    adam, by_hand = make()
    step(adam, by_hand, 10)
    rows = {"a": random(2, 3, seed=5), "b": random(2, 2, 2, seed=6)}
    adam.append_rows(rows)
    for name, reference in by_hand.items():
        zeros = torch.zeros_like(rows[name]).double()
        reference.value = torch.cat([reference.value, rows[name].double()])
        reference.m, reference.v = torch.cat([reference.m, zeros]), torch.cat([reference.v, zeros])
    assert_agree(adam, by_hand)
    step(adam, by_hand, 40)
    assert_agree(adam, by_hand)


def test_replaced_values_have_zero_moments_and_the_other_tensor_is_untouched():
    adam, by_hand = make()
    step(adam, by_hand, 10)
    values = random(6, 3, seed=7)
    adam.replace("a", values)
    by_hand["a"].value = values.double()
    by_hand["a"].m, by_hand["a"].v = (torch.zeros(6, 3).double() for _ in range(2))
    assert_agree(adam, by_hand)
    values.zero_()
    assert_agree(adam, by_hand)


def test_rows_can_change_before_the_first_step():
    adam, by_hand = make()
    adam.keep_rows(torch.arange(6) < 4)
    for reference in by_hand.values():
        reference.value, reference.m, reference.v = (
            tensor[:4] for tensor in (reference.value, reference.m, reference.v)
        )
    step(adam, by_hand, 10)
    assert_agree(adam, by_hand)


def test_changed_tensors_have_no_gradient_and_sit_out_the_step():
    adam, _ = make()
    for parameter in adam.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    adam.replace("a", adam.parameters["a"])
    assert list(adam.gradients()) == ["b"]
    before = adam.parameters["a"].detach().clone()
    adam.step()
    assert torch.equal(adam.parameters["a"], before)
    assert adam.gradients() == {}


def test_values_given_are_copied():
    values = {"a": torch.ones(2, 3), "b": torch.ones(2, 2, 2)}
    adam = GroupedAdam(values, RATES)
    values["a"].zero_()
    assert torch.equal(adam.parameters["a"].detach(), torch.ones(2, 3))


def test_learning_rates_act_from_the_next_step():
    adam, by_hand = make()
    step(adam, by_hand, 10)
    adam.set_learning_rate("a", 0.5)
    by_hand["a"].rate = 0.5
    step(adam, by_hand, 20)
    assert_agree(adam, by_hand)
    assert adam.learning_rates() == {"a": 0.5, "b": 0.01}


def test_state_comes_back_to_the_last_bit():
    adam, by_hand = make()
    step(adam, by_hand, 10)
    adam.set_learning_rate("b", 0.3)
    saved = adam.state_dict()
    twin = GroupedAdam(adam.parameters, RATES)
    twin.load_state_dict(copy.deepcopy(saved))
    step(adam, by_hand, 20)
    for name, parameter in twin.parameters.items():
        parameter.grad = random(*parameter.shape, seed=20 + list(twin.parameters).index(name))
    twin.step()
    for name in RATES:
        assert torch.equal(adam.parameters[name], twin.parameters[name])
    assert twin.learning_rates() == {"a": 0.1, "b": 0.3}


def test_state_of_other_groups_is_refused():
    adam, _ = make()
    saved = adam.state_dict()
    saved["param_groups"][0]["name"] = "something"
    with pytest.raises(ValueError, match="something"):
        adam.load_state_dict(saved)


def upstream_payload(n: int) -> dict:
    """A checkpoint as the recorded listing describes those of the original program."""
    listing = json.loads((GOLDEN_DIR / "case10_checkpoint_A" / "pt_listing.json").read_text())
    recorded = listing["coarse_pt"]

    def tensor(entry: dict, seed: int) -> torch.Tensor:
        shape = [n if size == 401 else size for size in entry["shape"]]
        return random(*shape, seed=seed).abs() if shape else torch.tensor(20.0)

    state = {
        int(index): {key: tensor(entry, int(index)) for key, entry in moments.items()}
        for index, moments in recorded["optimizer_state_dict"]["state"].items()
    }
    names = [
        group["name"].split("'")[1] for group in recorded["optimizer_state_dict"]["param_groups"]
    ]
    groups = [
        {
            "lr": 0.123,
            "name": name,
            "betas": [0.9, 0.999],
            "eps": 1e-15,
            "weight_decay": 0,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": False,
            "params": [i],
        }
        for i, name in enumerate(names)
    ]
    return {
        "state_dict": {name: tensor(entry, 50) for name, entry in recorded["state_dict"].items()},
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }


def trainable(n: int) -> TrainableCloud:
    cloud = GaussianCloud(
        torch.zeros(n, 3),
        torch.zeros(n, 1, 3),
        torch.zeros(n, 15, 3),
        torch.zeros(n, 1),
        torch.zeros(n, 3),
        torch.ones(n, 4),
    )
    return TrainableCloud(cloud, LearningRates(), 2.0)


def test_state_of_the_original_program_is_restored_under_our_names():
    payload = upstream_payload(7)
    model = trainable(3)
    model.restore(payload)
    assert len(model) == 7
    assert torch.equal(model.cloud.quats.detach(), payload["state_dict"]["_quaternions"])
    state = model.state()
    for index, moments in payload["optimizer_state_dict"]["state"].items():
        for name, value in moments.items():
            found = state["optimizer_state_dict"]["state"][index][name]
            assert torch.equal(found, value), (index, name)


def test_rates_of_the_run_replace_those_of_the_checkpoint():
    model = trainable(3)
    model.restore(upstream_payload(7))
    assert model.optimizer.learning_rates() == trainable(3).optimizer.learning_rates()


def test_optimiser_state_that_does_not_fit_is_a_user_error():
    payload = upstream_payload(7)
    payload["optimizer_state_dict"]["param_groups"][0]["name"] = "vertices"
    with pytest.raises(UserError, match="vertices"):
        trainable(3).restore(payload)


# In one launch, as on a GPU


def stepped_thrice(n_parameters: int) -> dict[str, torch.Tensor]:
    """Values and moments after three steps of parameters of different sizes and rates."""
    values = {f"p{k}": random(5 + 3 * k, k % 4 + 1, seed=k) for k in range(n_parameters)}
    optimizer = GroupedAdam(values, {name: 0.1 / (k + 1) for k, name in enumerate(values)})
    for seed in range(3):
        for k, parameter in enumerate(optimizer.parameters.values()):
            # Some sit a step out, and one gradient is not in one piece.
            if (k + seed) % 5:
                parameter.grad = random(*parameter.shape[::-1], seed=100 * seed + k).T
        optimizer.step()
    found = {name: p.detach() for name, p in optimizer.parameters.items()}
    for name, moments in optimizer.moments().items():
        found |= {f"{name} {kind}": moment for kind, moment in moments.items()}
    return found


@pytest.mark.parametrize("n_parameters", [1, 6, 8, 11])
def test_parameters_stepped_in_one_launch_are_those_stepped_one_by_one(monkeypatch, n_parameters):
    expected = stepped_thrice(n_parameters)
    monkeypatch.setattr(adam, "in_one_launch", lambda device: True)
    found, again = stepped_thrice(n_parameters), stepped_thrice(n_parameters)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-7)
        assert torch.equal(found[name], again[name])


def test_what_is_not_plain_float32_is_stepped_by_itself(monkeypatch):
    config = OptimizerConfig("bf16", use_bfloat16=True)
    values = {"means": random(40, 3), "sh_rest": random(40, 15, 3)}

    def step() -> dict[str, torch.Tensor]:
        optimizer = GroupedAdam(values, dict.fromkeys(values, 0.1), config)
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {name: p.detach() for name, p in optimizer.parameters.items()}

    expected = step()
    monkeypatch.setattr(adam, "in_one_launch", lambda device: True)
    for name, value in step().items():
        assert torch.equal(value, expected[name])
