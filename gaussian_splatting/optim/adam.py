# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups whose rows come and go, with their moments, while training.

On a GPU launches cost most, so all float32 parameters share one. Values or moments in bfloat16 are
read in the type they are stored in, stepped in float32, and written back. The step uses the new
moments before they are rounded. Rounding is stochastic, because a moment changes by less than its
spacing: a number goes to one of its two neighbours with a probability that keeps the mean. The
random bits are a hash of the seed of the step and the number of the element, so they depend neither
on threads nor on the past.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import warp as wp
from torch import Tensor
from torch.optim.adam import adam

from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER, OptimizerConfig
from sugar_utils.random import derive_seed
from sugar_utils.warp_arrays import Floats
from sugar_utils.warp_launch import launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-15
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_PARAMETERS = 8  # in one launch
_GROUPS = wp.constant(MAX_PARAMETERS)
_MIN_ELEMENTS = 16_384
Addresses = wp.types.vector(length=4 * MAX_PARAMETERS, dtype=wp.uint64)
Ends = wp.types.vector(length=MAX_PARAMETERS, dtype=wp.int32)
Numbers = wp.types.vector(length=MAX_PARAMETERS, dtype=wp.float32)
# Typed here: inside a kernel such a literal is a signed integer, and a compiler warns.
_DROPPED_BITS = wp.constant(wp.uint32(0xFFFF))
_KEPT_BITS = wp.constant(wp.uint32(0xFFFF0000))

_TYPES = {torch.float32: wp.array(dtype=float), torch.bfloat16: wp.array(dtype=wp.bfloat16)}
# What torch.optim.Adam writes of each group, so that it can read our files.
_GROUP_SETTINGS = {
    "betas": ADAM_BETAS,
    "eps": ADAM_EPS,
    "weight_decay": 0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
}


@dataclass(frozen=True)
class Stepped:
    """A parameter and its step."""

    value: Tensor  # changed in place, (N, ...) float32 or bfloat16
    gradient: Tensor
    moments: dict[str, Tensor]  # changed in place, both of one type, float32 or bfloat16
    rate: float
    count: int  # of its steps, this one included
    seed: int

    @property
    def corrections(self) -> tuple[float, float]:
        """Rate over the bias correction of the first moment, and the root of the second's."""
        size = self.rate / (1.0 - ADAM_BETAS[0] ** self.count)
        return size, (1.0 - ADAM_BETAS[1] ** self.count) ** 0.5


# The shares of what is new come from the host: 1 - 0.999 in float32 is wrong in its sixth digit.
# Arrays of several types and sizes would be a kernel argument each; addresses are one for all.
@wp.func_native("""
float* value = (float*)value_at;
float* exp_avg = (float*)exp_avg_at;
float* exp_avg_sq = (float*)exp_avg_sq_at;
float g = ((const float*)gradient_at)[i];
float m = decays[0] * exp_avg[i] + decays[1] * g;
float v = decays[2] * exp_avg_sq[i] + decays[3] * g * g;
exp_avg[i] = m;
exp_avg_sq[i] = v;
value[i] -= step_size * m / (sqrtf(v) / root_correction + eps);
""")
def step_element(
    value_at: wp.uint64,
    gradient_at: wp.uint64,
    exp_avg_at: wp.uint64,
    exp_avg_sq_at: wp.uint64,
    i: int,
    step_size: float,
    root_correction: float,
    decays: wp.vec4,
    eps: float,
): ...


@wp.kernel
def step_parameters(
    first: int,
    addresses: Addresses,
    ends: Ends,
    step_sizes: Numbers,
    root_corrections: Numbers,
    decays: wp.vec4,
    eps: float,
):
    """One element of any of the parameters, whose elements are numbered through."""
    i = first + wp.tid()
    begin = int(0)
    value = addresses[0]
    gradient = addresses[1]
    exp_avg = addresses[2]
    exp_avg_sq = addresses[3]
    step_size = step_sizes[0]
    root_correction = root_corrections[0]
    # Unrolled, and chosen one after the other: an index that is computed would send all of these
    # to memory.
    for k in range(1, _GROUPS):
        if i >= ends[k - 1]:
            begin = ends[k - 1]
            value = addresses[4 * k]
            gradient = addresses[4 * k + 1]
            exp_avg = addresses[4 * k + 2]
            exp_avg_sq = addresses[4 * k + 3]
            step_size = step_sizes[k]
            root_correction = root_corrections[k]
    step_element(
        value,
        gradient,
        exp_avg,
        exp_avg_sq,
        i - begin,
        step_size,
        root_correction,
        decays,
        eps,
    )


def in_one_launch(device: torch.device) -> bool:
    return device.type != "cpu"


def step_together(parameters: Sequence[Stepped]) -> None:
    """Step float32 parameters of one device, eight at a time; each as by itself."""
    for start in range(0, len(parameters), MAX_PARAMETERS):
        _launch(parameters[start : start + MAX_PARAMETERS])


def _launch(parameters: Sequence[Stepped]) -> None:
    # Held until the launch: a gradient may be a copy.
    tensors = [
        t
        for p in parameters
        for t in (p.value, p.gradient.contiguous(), *(p.moments[name] for name in MOMENTS))
    ]
    factors = [p.corrections for p in parameters]
    ends = list(itertools.accumulate(p.value.numel() for p in parameters))
    total = ends[-1]
    missing = MAX_PARAMETERS - len(parameters)
    arguments = [
        Addresses(*(t.data_ptr() for t in tensors), *[0] * (4 * missing)),
        Ends(*ends, *[2**31 - 1] * missing),
        Numbers(*(size for size, _ in factors), *[0.0] * missing),
        Numbers(*(root for _, root in factors), *[1.0] * missing),
        wp.vec4(*(share for beta in ADAM_BETAS for share in (beta, 1.0 - beta))),
        ADAM_EPS,
    ]
    device = tensors[0].device
    launch(step_parameters, total, arguments, device=device, min_items=_MIN_ELEMENTS)


@wp.struct
class StepSettings:
    seed: wp.uint32
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float


@wp.func
def rounded_to_bf16(x: float, noise: wp.uint32) -> float:
    """One of the two bfloat16 next to x, with mean x; the low 16 bits of ``noise`` decide."""
    bits = wp.cast(x, wp.uint32) + (noise & _DROPPED_BITS)
    return wp.cast(bits & _KEPT_BITS, wp.float32)


@wp.func
def put(target: Floats, i: int, x: float, noise: wp.uint32):
    target[i] = x


@wp.func
def put(target: wp.array(dtype=wp.bfloat16), i: int, x: float, noise: wp.uint32):  # noqa: F811
    target[i] = wp.bfloat16(rounded_to_bf16(x, noise))


@wp.kernel
def step_elements(
    first: int,
    s: StepSettings,
    grads: wp.array(dtype=Any),
    values: wp.array(dtype=Any),
    exp_avg: wp.array(dtype=Any),
    exp_avg_sq: wp.array(dtype=Any),
):
    i = first + wp.tid()
    g = float(grads[i])
    m = s.beta1 * float(exp_avg[i]) + (1.0 - s.beta1) * g
    v = s.beta2 * float(exp_avg_sq[i]) + (1.0 - s.beta2) * g * g
    noise = hashed(s.seed + wp.uint32(i))
    update = s.step_size * m / (wp.sqrt(v) / s.root_correction + s.eps)
    put(values, i, float(values[i]) - update, noise)
    put(exp_avg, i, m, noise >> wp.uint32(16))
    put(exp_avg_sq, i, v, hashed(noise))


_STEP_ELEMENTS = {
    (v, m): wp.overload(step_elements, dict(grads=V, values=V, exp_avg=M, exp_avg_sq=M))
    for v, V in _TYPES.items()
    for m, M in _TYPES.items()
}
"""By the types of values (and gradients) and of moments."""


def step_rounding(parameter: Stepped) -> None:
    """Step one parameter of which values or moments are in bfloat16."""
    value = parameter.value
    moments = parameter.moments
    settings = StepSettings()
    settings.seed = parameter.seed & 0xFFFFFFFF
    settings.beta1, settings.beta2 = ADAM_BETAS
    settings.step_size, settings.root_correction = parameter.corrections
    settings.eps = ADAM_EPS
    tensors = [t.detach().contiguous().view(-1) for t in (parameter.gradient, value)]
    tensors += [moments[name].view(-1) for name in MOMENTS]
    kernel = _STEP_ELEMENTS[value.dtype, moments[MOMENTS[0]].dtype]
    launch(kernel, value.numel(), [settings, *tensors], min_items=_MIN_ELEMENTS)


@dataclass
class _Group:
    rate: float
    moment_dtype: torch.dtype
    steps: int = 0
    moments: dict[str, Tensor] | None = None  # by name, as ``value``; None before the first step
    moved: bool = False


class GroupedAdam:
    """One Adam parameter group per named tensor, betas (0.9, 0.999), eps 1e-15."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        learning_rates: Mapping[str, float],
        config: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.parameters = {
            name: _leaf(value.detach().to(config.value_dtype(name), copy=True))
            for name, value in tensors.items()
        }
        self._groups = {n: _Group(learning_rates[n], config.moment_dtype(n)) for n in tensors}
        self._seed = seed
        self._unused: set[str] = set()

    def learning_rates(self) -> dict[str, float]:
        return {name: group.rate for name, group in self._groups.items()}

    def set_learning_rate(self, name: str, value: float) -> None:
        self._groups[name].rate = value

    def mark_unused(self, name: str) -> None:
        """Say that a parameter acts on nothing: it steps as with a gradient of zeros."""
        self._unused.add(name)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient or is unused, then drop the gradients."""
        together: list[Stepped] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None and name not in self._unused:
                continue
            group = self._groups[name]
            group.steps += 1
            if group.moments is None:
                dtype = group.moment_dtype
                group.moments = {m: torch.zeros_like(parameter, dtype=dtype) for m in MOMENTS}
            if parameter.grad is None:
                if not group.moved:
                    # Zero moments and a gradient of zeros: only the count goes on.
                    continue
                parameter.grad = torch.zeros_like(parameter)
            group.moved = True
            seed = derive_seed(self._seed, "rounding", name, group.steps)
            stepped = Stepped(
                parameter, parameter.grad, group.moments, group.rate, group.steps, seed
            )
            if any(t.dtype != torch.float32 for t in (parameter, *group.moments.values())):
                step_rounding(stepped)
            elif in_one_launch(parameter.device):
                together.append(stepped)
            else:
                _step_by_torch(stepped)
            parameter.grad = None
        step_together(together)
        self._unused.clear()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._unused.clear()

    def drop_gradient(self, name: str) -> None:
        """Let one parameter sit the next step out."""
        self.parameters[name].grad = None
        self._unused.discard(name)

    def take_gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name, where there are any; the parameters have none then."""
        found = self.gradients()
        self.zero_grad()
        return found

    def add_gradients(self, more: Mapping[str, Tensor]) -> None:
        """Add what :meth:`take_gradients` took; it must not be used afterwards."""
        for name, gradient in more.items():
            own = self.parameters[name].grad
            self.parameters[name].grad = gradient if own is None else own.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        return {n: g.moments for n, g in self._groups.items() if g.moments is not None}

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name in self.parameters:
            self._swap(name, self.parameters[name].detach()[keep], lambda m: m[keep])

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        for name, new in rows.items():
            old = self.parameters[name].detach()
            n = new.shape[0]
            values = torch.cat([old, new.to(old.dtype)])
            self._swap(name, values, lambda m, n=n: torch.cat([m, m.new_zeros(n, *m.shape[1:])]))

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        dtype = self.config.value_dtype(name)
        self._swap(name, values.detach().to(dtype, copy=True), torch.zeros_like)

    def state_dict(self) -> dict:
        """Adam's state in torch's format, with one named group per tensor."""
        state = {}
        groups = []
        for index, (name, group) in enumerate(self._groups.items()):
            if group.moments is not None:
                step = torch.tensor(float(group.steps), device="cpu")
                state[index] = {"step": step, **group.moments}
            groups.append({"lr": group.rate, "name": name, **_GROUP_SETTINGS, "params": [index]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state saved by :meth:`state_dict` (or by torch's Adam), in any format."""
        names = [group.get("name") for group in state["param_groups"]]
        if names != list(self.parameters):
            raise ValueError(f"optimiser groups {names}, expected {list(self.parameters)}")
        for index, (name, group) in enumerate(self._groups.items()):
            saved = state["state"].get(index)
            group.rate = state["param_groups"][index]["lr"]
            group.steps = 0 if saved is None else int(saved["step"])
            group.moments = None if saved is None else self._moments_of(name, saved)
            group.moved = any(bool(m.any()) for m in (group.moments or {}).values())

    def _moments_of(self, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        for moment in MOMENTS:
            found = tuple(saved[moment].shape)
            expected = tuple(parameter.shape)
            if found != expected:
                raise ValueError(f"{moment} of {name} has shape {found}, expected {expected}")
        dtype = self._groups[name].moment_dtype
        return {m: saved[m].to(parameter.device, dtype).contiguous() for m in MOMENTS}

    def _swap(self, name: str, values: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        group = self._groups[name]
        if group.moments is not None:
            group.moments = {n: change(m).contiguous() for n, m in group.moments.items()}
        self.parameters[name] = _leaf(values)
        self._unused.discard(name)


def _leaf(values: Tensor) -> Tensor:
    return values.detach().contiguous().requires_grad_(True)


def _step_by_torch(parameter: Stepped) -> None:
    """The fused kernel of torch; it counts the steps itself, and takes gradients for gapless."""
    value = parameter.value
    moments = parameter.moments
    before = torch.full((), parameter.count - 1.0, device=value.device)
    adam(
        [value],
        [parameter.gradient.contiguous()],
        [moments["exp_avg"]],
        [moments["exp_avg_sq"]],
        [],
        [before],
        fused=True,
        amsgrad=False,
        beta1=ADAM_BETAS[0],
        beta2=ADAM_BETAS[1],
        lr=parameter.rate,
        weight_decay=0.0,
        eps=ADAM_EPS,
        maximize=False,
    )
