# SPDX-License-Identifier: Apache-2.0
"""Parity checks of values: fields, neighbours, Adam, diamonds, the depth-normal term."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.common import Finding, Setup, compare, draw, equal
from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.optim.adam_steps import (
    ADAM_BETAS,
    ADAM_EPS,
    MOMENTS,
    ParameterState,
    Stepped,
    step_alone,
    step_rounding,
    step_together,
)
from gaussian_splatting.optim.band_steps import step_in_registers
from gaussian_splatting.rasterization import complete_normals
from gaussian_splatting.rasterization.coefficient_gradients import coefficient_gradients
from gaussian_splatting.rasterization.projection_kernels import camera_record
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import diamond_faces, diamond_vertices
from sugar_trainers.losses import fused_depth_normal_consistency
from sugar_utils.neighbors import nearest_neighbors
from tests.support.depth_normals import depth_normal_consistency
from tests.support.field_reference import evaluate_fields_reference
from tests.support.neighbor_reference import nearest_neighbors_reference
from tests.support.step_scenes import Case, make_scene

FIELD_FLIPS = 1e-3
NEIGHBORS = 16
RATE = 0.01


def _surface(n: int) -> list[Tensor]:
    """Flat Gaussians on a sphere, as large as the space between them."""
    rng = torch.Generator().manual_seed(0)
    means = torch.nn.functional.normalize(torch.randn(n, 3, generator=rng), dim=1)
    means = means + 0.01 * torch.randn(n, 3, generator=rng)
    scales = (12.0 / n) ** 0.5 * torch.exp(0.4 * torch.randn(n, 3, generator=rng))
    scales[torch.arange(n), torch.randint(0, 3, (n,), generator=rng)] *= 0.15
    quats = torch.nn.functional.normalize(torch.randn(n, 4, generator=rng), dim=1)
    return [means, quats, scales, torch.rand(n, generator=rng)]


def fields(setup: Setup) -> Iterator[Finding]:
    """Values at samples, and gradients of all fields together."""
    n, n_samples = setup.size(3_000, 300), setup.size(40_000, 2_000)
    scene = _surface(n)
    neighbors = nearest_neighbors(scene[0], NEIGHBORS).indices
    rng = torch.Generator().manual_seed(1)
    indices = torch.randint(n, (n_samples,), generator=rng).sort().values
    noise = torch.randn(n_samples, 3, generator=rng)
    results = []
    for place, dtype in ((setup.place, torch.float32), (torch.device("cpu"), torch.float64)):
        leaves = [t.to(place, dtype, copy=True).requires_grad_() for t in scene]
        samples = [neighbors.to(place), indices.to(place), noise.to(place, dtype)]
        if dtype == torch.float32:
            found = evaluate_fields(*leaves, *samples, 1.0, native=False)
        else:
            found = evaluate_fields_reference(*leaves, *samples, 1.0)
        weights = [draw(*f.shape, seed=i).to(place, dtype) for i, f in enumerate(found)]
        sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
        results.append((found, [leaf.grad for leaf in leaves]))
    (found, grads), (truth, true_grads) = results
    for name, values in found._asdict().items():
        yield compare(name, values, getattr(truth, name), 1e-4, flips=FIELD_FLIPS)
    names = ("means", "quats", "scales", "opacities")
    for name, grad, true in zip(names, grads, true_grads, strict=True):
        yield compare(f"gradient of {name}", grad, true, 1e-4, flips=FIELD_FLIPS)


def _arrangements(n: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(7)
    lattice = torch.randint(0, 6, (n, 3), generator=rng).float()
    far = torch.rand(n, 3, generator=rng)
    far[5], far[6], far[7] = 1e6, -1e9, 1e30
    sheet = draw(n, 3) * torch.tensor([1.0, 1.0, 1e-5])
    return {
        "random": torch.rand(n, 3, generator=rng),
        "lattice": lattice,
        "outliers": far,
        "thin sheet": sheet,
        "one place": torch.ones(n, 3),
        "few": torch.rand(3, 3, generator=rng),
    }


def neighbors(setup: Setup) -> Iterator[Finding]:
    """Exact, self first, then by distance and index, whatever the arrangement."""
    for name, points in _arrangements(setup.size(2_000, 600)).items():
        n = points.shape[0]
        every = nearest_neighbors_reference(points, points, n)
        is_self = every.indices == torch.arange(n, dtype=torch.int32)[:, None]
        order = torch.where(is_self, -1.0, every.sq_distances).sort(dim=1, stable=True).indices
        found = nearest_neighbors(points.to(setup.place), NEIGHBORS)
        k = min(n, NEIGHBORS)
        for what, own, true in zip(("indices", "distances"), found, every, strict=True):
            yield equal(f"{name}, {what}", own, true.gather(1, order)[:, :k])


def adam_in_bfloat16(setup: Setup) -> Iterator[Finding]:
    """A first and a second step with rounded moments, against float64 and the CPU."""
    n, width = setup.size(20_000, 500), 45
    grad, start = draw(n, width, seed=1), draw(n, width, seed=2)
    truth = start.double() - RATE * grad.double() / (grad.double().abs() + ADAM_EPS)
    firsts, seconds, stored = [], [], []
    for place in (setup.place, torch.device("cpu")):
        value, own = start.to(place, copy=True), grad.to(place)
        moments = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name in MOMENTS}
        step_rounding(Stepped(ParameterState(value, moments, RATE, 1, 7), own))
        firsts.append(value.clone())
        stored.append({name: t.to("cpu", copy=True) for name, t in moments.items()})
        step_rounding(Stepped(ParameterState(value, moments, RATE, 2, 8), own))
        seconds.append(value)
    yield compare("values", firsts[0], truth, 1e-6)
    for name, kept in stored[0].items():
        # Stochastic rounding may fall to the next value where the last bit differs.
        yield compare(name, kept, stored[1][name], 1e-2, flips=1e-3)
    yield compare("second step", seconds[0], seconds[1], 1e-4, flips=1e-2)


def adam_in_registers(setup: Setup) -> Iterator[Finding]:
    """Steps of coefficients whose gradients are formed in registers, beside those that read them.

    Stochastic rounding may fall to the next value where the last bit of a gradient differs.
    """
    n = setup.size(100_000, 500)
    camera = camera_record(make_scene(Case("registers", 10, 48, 36, 1))[1], setup.place)
    means, colors, start = draw(n, 3, seed=1), draw(n, 3, seed=2), draw(n, 45, seed=3)
    gradient = ColorGradient(colors.to(setup.place), means.to(setup.place), camera, 3)
    for dtype in (torch.float32, torch.bfloat16):
        states = []
        for _ in range(2):
            value = start.view(n, 15, 3).to(setup.place, copy=True)
            moments = {name: torch.zeros_like(value, dtype=dtype) for name in MOMENTS}
            states.append(ParameterState(value, moments, RATE, 1, 7))
        step_in_registers(states[0], gradient)
        whole = coefficient_gradients(gradient, slice(0, n), states[1].value)
        step_alone(Stepped(states[1], whole))
        one, other = (state.value.view(n, 45) for state in states)
        yield compare(f"values, moments in {dtype}", one, other, 1e-5)
        for name in MOMENTS:
            one, other = (state.moments[name].view(n, 45).float() for state in states)
            limits = {"flips": 1e-2} if dtype == torch.bfloat16 else {}
            yield compare(f"{name} in {dtype}", one, other, 1e-5, **limits)


def adam_together(setup: Setup) -> Iterator[Finding]:
    """Parameters of several sizes stepped twice in one launch, beside each by itself in float64."""
    n = setup.size(20_000, 500)
    starts = [draw(n, width, seed=width) for width in (3, 1, 45)]
    gradients = [draw(n, width, seed=100 + width) for width in (3, 1, 45)]
    values = [t.to(setup.place, copy=True) for t in starts]
    kept = [{name: torch.zeros_like(v) for name in MOMENTS} for v in values]
    truth = [t.double().requires_grad_() for t in starts]
    groups = [{"params": [t], "lr": RATE * (k + 1)} for k, t in enumerate(truth)]
    optimizer = torch.optim.Adam(groups, eps=ADAM_EPS, betas=ADAM_BETAS)
    for number in (1, 2):
        rates = [RATE * (k + 1) for k in range(len(values))]
        counts, seeds = [number] * len(values), [0] * len(values)
        own = [g.to(setup.place) for g in gradients]
        states = map(ParameterState, values, kept, rates, counts, seeds)
        step_together(list(map(Stepped, states, own)))
        for parameter, gradient in zip(truth, gradients, strict=True):
            parameter.grad = gradient.double()
        optimizer.step()
    for found, exact in zip(values, truth, strict=True):
        yield compare(f"{found.shape[1]} columns", found, exact, 1e-6)


def depth_normals(setup: Setup) -> Iterator[Finding]:
    """The fused term, its gradients, and the same again: value, depth and normals."""
    height, width = setup.size((622, 960), (48, 36))
    lens = torch.tensor([0.9 * width, 0.9 * width, 0.5 * width, 0.5 * height])
    depth = 2 + 0.01 * draw(height, width, seed=1)
    normal_xy = 0.15 * draw(height, width, 2, seed=2)
    found = [t.to(setup.place, copy=True).requires_grad_() for t in (depth, normal_xy)]
    truth = [t.double().requires_grad_() for t in (depth, normal_xy)]
    value = fused_depth_normal_consistency(*found, lens.to(setup.place))
    expected = depth_normal_consistency(truth[0], complete_normals(truth[1]), *lens.tolist())
    value.backward()
    expected.backward()
    yield compare("value", value.reshape(1, 1), expected.reshape(1, 1), 1e-5)
    for name, a, b in zip(("depth", "normals"), found, truth, strict=True):
        yield compare(f"gradient of {name}", a.grad.reshape(-1, 1), b.grad.reshape(-1, 1), 1e-4)


def diamonds(setup: Setup) -> Iterator[Finding]:
    """Corners of the quads that stand for Gaussians in meshing."""
    scene = _surface(setup.size(100_000, 500))[:3]
    found = diamond_vertices(*(t.to(setup.place) for t in scene))
    truth = diamond_vertices(*(t.double() for t in scene))
    yield compare("corners", found.reshape(-1, 3), truth.reshape(-1, 3), 1e-5)
    n = scene[0].shape[0]
    yield equal("faces", diamond_faces(n, setup.place), diamond_faces(n))


CHECKS = {
    "fields": fields,
    "neighbours": neighbors,
    "Adam in bfloat16": adam_in_bfloat16,
    "Adam, together": adam_together,
    "Adam, in registers": adam_in_registers,
    "depth and normals": depth_normals,
    "diamonds": diamonds,
}
