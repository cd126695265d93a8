# SPDX-License-Identifier: Apache-2.0
"""Moments and values in few bits: unbiased rounding, training as with float32, rows, files."""

import copy
import functools
import math

import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.random import derive_seed
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.adam_steps import (
    ADAM_BETAS,
    MOMENTS,
    ParameterState,
    Stepped,
    step_rounding,
)
from gaussian_splatting.optim.optimizer_config import STATE_FORMATS, OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from sugar_utils.errors import UserError
from tests.support.random_scenes import random

WIDTH = 45
CONFIGS = [
    OptimizerConfig(state, bfloat16) for state in STATE_FORMATS for bfloat16 in (False, True)
]
STORED = [c for c in CONFIGS if c.identity()]


def name_of(config: OptimizerConfig) -> str:
    return "-".join(["fp32", *map(str, config.identity())]) if config.identity() else "default"


def make(config: OptimizerConfig, n: int = 8, seed: int = 3) -> GroupedAdam:
    values = {"means": random(n, 3, seed=1), "sh_rest": 0.1 * random(n, 15, 3, seed=2)}
    return GroupedAdam(values, {"means": 0.01, "sh_rest": 0.001}, config, seed)


def step(adam: GroupedAdam, seed: int) -> None:
    for offset, p in enumerate(adam.parameters.values()):
        p.grad = random(*p.shape, seed=seed + offset).to(p.dtype)
    adam.step()


def snapshot(adam: GroupedAdam) -> dict[str, torch.Tensor]:
    """All that the optimiser keeps, by name."""
    moments = {f"{p} {k}": v for p, ms in adam.moments().items() for k, v in ms.items()}
    return {n: t.detach().clone() for n, t in {**adam.parameters, **moments}.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(), 48 * 12),
        (OptimizerConfig("bf16"), 48 * 8),
        (OptimizerConfig("fp32", use_bfloat16=True), 3 * 12 + 45 * 6),
        (OptimizerConfig("bf16", use_bfloat16=True), 3 * 8 + 45 * 6),
    ],
)
def test_a_row_takes_as_many_bytes_as_promised(config, expected):
    adam = make(config)
    step(adam, 1)
    assert sum(t.nbytes for t in snapshot(adam).values()) == expected * 8


def test_float32_is_the_adam_of_torch_to_the_last_bit():
    ours, values = make(OptimizerConfig()), make(OptimizerConfig()).parameters
    groups = [{"params": [p], "lr": lr} for p, lr in zip(values.values(), (0.01, 0.001), strict=1)]
    theirs = torch.optim.Adam(groups, eps=1e-15, fused=True)
    for seed in range(5):
        step(ours, seed)
        for offset, p in enumerate(values.values()):
            p.grad = random(*p.shape, seed=seed + offset)
        theirs.step()
    for name, p in values.items():
        assert torch.equal(ours.parameters[name], p)


def test_torch_reads_the_state_of_every_format():
    for config in CONFIGS:
        adam = make(config)
        step(adam, 1)
        values = [torch.zeros(p.shape, requires_grad=True) for p in adam.parameters.values()]
        theirs = torch.optim.Adam([{"params": [v]} for v in values], eps=1e-15)
        theirs.load_state_dict(adam.state_dict())
        exp_avg = theirs.state[values[1]]["exp_avg"]
        assert exp_avg.dtype == torch.float32
        # After one step the first moment is a tenth of the gradient.
        torch.testing.assert_close(exp_avg, 0.1 * random(8, 15, 3, seed=2), rtol=0.2, atol=2e-3)


@pytest.mark.parametrize("config", STORED, ids=name_of)
def test_first_step_is_that_of_adam(config):
    """The step is made before anything is rounded, so only a bfloat16 value may differ."""
    adam, exact = make(config), make(OptimizerConfig())
    before = {n: p.detach().float().clone() for n, p in adam.parameters.items()}
    exact_before = {n: p.detach().clone() for n, p in exact.parameters.items()}
    step(adam, 1)
    step(exact, 1)
    for name, p in adam.parameters.items():
        change = p.detach().float() - before[name]
        expected = exact.parameters[name].detach() - exact_before[name]
        spacing = 2.0**-7 * before[name].abs().max() if p.dtype == torch.bfloat16 else 1e-6
        assert float((change - expected).abs().max()) <= spacing


def bfloat16_moments(like: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(like, dtype=torch.bfloat16) for name in MOMENTS}


@pytest.mark.parametrize("which", MOMENTS)
def test_rounding_of_moments_is_unbiased(which):
    """One gradient in many rows, many seeds: what is kept is the exact moment on average."""
    n_rows, n_seeds = 40, 100
    draws = n_rows * n_seeds
    grad = random(1, WIDTH, seed=5)
    exact = 0.1 * grad if which == "exp_avg" else 0.001 * grad**2
    total, squares = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
    rows = grad.expand(n_rows, WIDTH).contiguous()
    for seed in range(n_seeds):
        moments = bfloat16_moments(rows)
        state = ParameterState(torch.zeros_like(rows), moments, 0.0, 1, seed * 7919)
        step_rounding(Stepped(state, rows))
        kept = moments[which].float()
        total += kept.sum(dim=0, keepdim=True)
        squares += ((kept - exact) ** 2).sum(dim=0, keepdim=True)
    error, spread = total / draws - exact, (squares / draws).sqrt()
    # A neighbour that is drawn once in thousands of times may not have come up.
    rare = exact.abs().max() * 1e-4
    assert float(spread.max()) > 0
    assert bool((error.abs() <= 4.5 * spread / math.sqrt(draws) + rare).all())
    # To nearest, errors would be as large as half a spacing.
    assert float((error.abs() / exact.abs()).median()) < 2e-4


def test_rounding_of_bfloat16_values_is_unbiased_and_keeps_what_does_not_move():
    n = 20_000
    adam = GroupedAdam(
        {"sh_rest": torch.full((n, 15, 3), 0.1)},
        {"sh_rest": 1e-5},
        OptimizerConfig(use_bfloat16=True),
    )
    start = float(adam.parameters["sh_rest"].detach()[0, 0, 0])
    gradient = torch.ones(n, 15, 3, dtype=torch.bfloat16)
    gradient[:, 1] = 0
    adam.parameters["sh_rest"].grad = gradient
    adam.step()
    after = adam.parameters["sh_rest"].detach().double()
    # A tenth of a spacing of bfloat16 at 0.1 and less.
    assert float(after[:, 0].mean()) == pytest.approx(start - 1e-5, abs=4e-7)
    assert bool((after[:, 1] == start).all())


def test_constant_gradient_gives_the_moments_that_it_should():
    """Rounded to nearest, the second moment would stop far below the square of the gradient."""
    grad = 10.0 ** torch.linspace(-1, 0, WIDTH).expand(400, WIDTH).contiguous()
    value, moments = torch.zeros_like(grad), bfloat16_moments(grad)
    for count in range(1, 1001):
        state = ParameterState(value, moments, 0.0, count, count * 104_729)
        step_rounding(Stepped(state, grad))
    kept = {n: m.float() / grad ** (1 + (n == "exp_avg_sq")) for n, m in moments.items()}
    for name, beta in zip(("exp_avg", "exp_avg_sq"), ADAM_BETAS, strict=True):
        expected = 1 - beta**1000
        assert float(kept[name].mean()) == pytest.approx(expected, rel=0.01)
        assert float(kept[name].std()) < 0.12 * expected


@pytest.mark.parametrize("config", STORED, ids=name_of)
def test_least_squares_are_solved_as_well_as_in_float32(config):
    """Noisy gradients of a quadratic; the mean error left is that of float32."""

    # A bfloat16 value of 0.2 has a spacing of 1e-3.
    spacing = 4e-4 if config.use_bfloat16 else 0.0
    assert error_left(config) <= 1.1 * error_left(OptimizerConfig()) + spacing


@functools.cache
def error_left(config: OptimizerConfig) -> float:
    """Root of the mean squared error after 200 steps."""
    target = 0.2 * random(16, 15, 3, seed=9)
    adam = GroupedAdam({"sh_rest": torch.zeros(16, 15, 3)}, {"sh_rest": 0.005}, config)
    for i in range(200):
        adam.set_learning_rate("sh_rest", 0.005 * 0.97 ** max(0, i - 100))
        p = adam.parameters["sh_rest"]
        noise = 0.05 * random(16, 15, 3, seed=1000 + i)
        p.grad = (p.detach().float() - target + noise).to(p.dtype)
        adam.step()
    return float((adam.parameters["sh_rest"].detach().float() - target).square().mean().sqrt())


@pytest.mark.parametrize("config", STORED, ids=name_of)
def test_kept_rows_are_moved_not_changed(config):
    adam, keep = make(config), torch.tensor([1, 0, 1, 1, 0, 1, 1, 0], dtype=bool)
    step(adam, 1)
    before = snapshot(adam)
    adam.keep_rows(keep)
    assert_same(snapshot(adam), {name: value[keep] for name, value in before.items()})


@pytest.mark.parametrize("config", STORED, ids=name_of)
def test_appended_rows_have_zero_moments_and_the_others_stay(config):
    adam = make(config)
    step(adam, 1)
    before = snapshot(adam)
    rows = {"means": random(2, 3), "sh_rest": random(2, 15, 3)}
    adam.append_rows(rows)
    after = snapshot(adam)
    assert_same({n: v[:8] for n, v in after.items()}, before)
    for name, value in after.items():
        expected = rows[name].to(value.dtype) if name in rows else torch.zeros_like(value[8:])
        assert torch.equal(value[8:], expected), name


@pytest.mark.parametrize("config", STORED, ids=name_of)
def test_replaced_values_have_zero_moments(config):
    adam = make(config)
    step(adam, 1)
    adam.replace("sh_rest", random(8, 15, 3))
    moments = adam.moments()["sh_rest"]
    assert not any(m.any() for m in moments.values())
    assert adam.parameters["sh_rest"].dtype == config.value_dtype("sh_rest")


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_resumed_state_goes_on_with_the_same_bits(config, tmp_path):
    adam = make(config)
    for seed in range(4):
        step(adam, 10 * seed)
    torch.save(adam.state_dict(), tmp_path / "state.pt")
    values = {n: p.detach().float() for n, p in adam.parameters.items()}
    twin = GroupedAdam(values, adam.learning_rates(), config, seed=3)
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(snapshot(twin), snapshot(adam))
    for seed in range(4, 7):
        step(adam, 10 * seed)
        step(twin, 10 * seed)
    assert_same(snapshot(twin), snapshot(adam))


@pytest.mark.parametrize("old", STATE_FORMATS)
@pytest.mark.parametrize("new", STATE_FORMATS)
def test_state_of_one_format_is_continued_in_another(old, new):
    adam, twin = make(OptimizerConfig(old)), make(OptimizerConfig(new))
    step(adam, 1)
    step(adam, 10)
    saved = copy.deepcopy(adam.state_dict())
    twin.load_state_dict(saved)
    for index in (0, 1):
        found, expected = (
            state["state"][index]["exp_avg"].float() for state in (twin.state_dict(), saved)
        )
        error = (found - expected).abs().max() / expected.abs().max()
        assert float(error) < 0.005
    step(twin, 20)
    assert all(bool(p.isfinite().all()) for p in twin.parameters.values())


def test_moments_of_another_shape_are_refused():
    adam = make(OptimizerConfig("bf16"))
    step(adam, 1)
    saved = adam.state_dict()
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"][:, :8]
    with pytest.raises(ValueError, match=r"exp_avg of sh_rest has shape \(8, 8, 3\)"):
        make(OptimizerConfig("bf16")).load_state_dict(saved)


def test_bits_do_not_depend_on_the_number_of_threads():
    n, results, before = 40_000, [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            adams = [make(OptimizerConfig(s, use_bfloat16=True), n) for s in STATE_FORMATS]
            for adam in adams:
                step(adam, 1)
            results.append([snapshot(adam) for adam in adams])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same(a, b)


def test_each_step_rounds_by_other_random_bits():
    """The same number rounded twice by the same bits would drift."""
    adams = [make(OptimizerConfig("bf16"), seed=s) for s in (0, 0, 1)]
    for adam in adams:
        step(adam, 1)
    a, b, c = (adam.moments()["sh_rest"]["exp_avg"] for adam in adams)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("together", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_the_seed_of_a_rounded_parameter_is_derived_once_a_step(together, monkeypatch):
    derived = []

    def counted(*labels):
        derived.append(labels)
        return derive_seed(*labels)

    expected = make(OptimizerConfig("bf16"))
    step(expected, 1)
    monkeypatch.setattr(f"{GroupedAdam.__module__}.derive_seed", counted)
    monkeypatch.setattr(f"{GroupedAdam.__module__}.in_one_launch", lambda device: together)
    found = make(OptimizerConfig("bf16"))
    step(found, 1)
    assert len(derived) == len(set(derived)) == 2
    assert_same(snapshot(found), snapshot(expected))


def test_rows_are_rounded_as_in_the_whole_and_only_by_numbers_of_the_host():
    value = random(6, WIDTH).bfloat16()
    moments = {name: torch.zeros(6, WIDTH, dtype=torch.bfloat16) for name in MOMENTS}
    gradient = random(6, WIDTH, seed=4).bfloat16()
    state = ParameterState(value, moments, rate=0.1, count=1, seed=2**32 - 40)
    pieces = copy.deepcopy(state)
    step_rounding(Stepped(state, gradient))
    for start in (0, 2, 4):
        rows = slice(start, start + 2)
        step_rounding(Stepped(pieces.rows(rows), gradient[rows]))
    assert torch.equal(pieces.value, value)
    assert torch.equal(pieces.moments["exp_avg"], moments["exp_avg"])
    with pytest.raises(ValueError, match="numbers of the host"):
        state._replace(on_device=state.inputs()).rows(slice(0, 2))


def cloud(n: int) -> GaussianCloud:
    return GaussianCloud(
        random(n, 3), random(n, 1, 3), random(n, 15, 3), random(n, 1), random(n, 3), random(n, 4)
    )


def test_files_hold_float32_values_whatever_is_stored():
    model = TrainableCloud(cloud(5), LearningRates(), 1.0, OptimizerConfig("bf16", True))
    saved = model.state()["state_dict"]
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert torch.equal(saved["_sh_coordinates_rest"], model.cloud.sh_rest.detach().float())
    # Histograms draw a sample first: a float32 copy of all colours is in no memory plan.
    shown, stored = model.distributions(), model.optimizer.parameters
    assert shown["sh_rest"].data_ptr() == stored["sh_rest"].data_ptr()
    assert shown["opacity"].data_ptr() == stored["opacity_logits"].data_ptr()


def test_restored_model_keeps_format_and_seed():
    config = OptimizerConfig("bf16", True)
    models = [TrainableCloud(cloud(5), LearningRates(), 1.0, config, seed=4) for _ in range(2)]
    for p in models[0].optimizer.parameters.values():
        p.grad = torch.ones_like(p)
    models[0].optimizer.step()
    models[1].restore(copy.deepcopy(models[0].state()))
    for model in models:
        for p in model.optimizer.parameters.values():
            p.grad = torch.full_like(p, 0.3)
        model.optimizer.step()
    assert_same(*(snapshot(model.optimizer) for model in models))


def test_moments_that_do_not_fit_are_a_user_error():
    model = TrainableCloud(cloud(5), LearningRates(), 1.0)
    for p in model.optimizer.parameters.values():
        p.grad = torch.ones_like(p)
    model.optimizer.step()
    payload = model.state()
    payload["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.zeros(4, 3)
    with pytest.raises(UserError, match="exp_avg of means"):
        TrainableCloud(cloud(5), LearningRates(), 1.0).restore(payload)
