# SPDX-License-Identifier: Apache-2.0
"""Adam over named parameter groups whose rows are added and removed, with their moments.

On a GPU launches cost most, so all float32 parameters share one. Values or moments in bfloat16 are
read in the type they are stored in, stepped in float32, and written back. The step uses the new
moments before they are rounded. Rounding is stochastic, because a moment changes by less than its
spacing: a number goes to one of its two neighbours with a probability that keeps the mean. The
random bits are a hash of the seed of the step and the number of the element, so they depend neither
on threads nor on the past.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import warp as wp
from torch import Tensor

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
# Settings that torch.optim.Adam saves with each group, so that it can read our files.
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
    """One parameter and the arguments of its step."""

    value: Tensor  # changed in place, (N, ...) float32 or bfloat16
    gradient: Tensor  # (N, ...)
    moments: dict[str, Tensor]  # changed in place, both of one type, float32 or bfloat16
    rate: float  # learning rate
    count: int  # steps of the parameter, this one included
    seed: int  # of the stochastic rounding; any number for float32, which is not rounded

    @property
    def is_rounded(self) -> bool:
        """Whether values or moments are stored in fewer bits than they are computed in."""
        return {self.value.dtype, self.moments[MOMENTS[0]].dtype} != {torch.float32}

    @property
    def corrections(self) -> tuple[float, float]:
        """Rate over the bias correction of the first moment, and the root of the second's."""
        step_size = self.rate / (1.0 - ADAM_BETAS[0] ** self.count)
        root_correction = (1.0 - ADAM_BETAS[1] ** self.count) ** 0.5
        return step_size, root_correction


# The weights of what is new are computed here: 1 - 0.999 in float32 is wrong in its sixth digit.
_STEP = f"""
const float decays[4] = {{{ADAM_BETAS[0]!r}f, {1.0 - ADAM_BETAS[0]!r}f,
                         {ADAM_BETAS[1]!r}f, {1.0 - ADAM_BETAS[1]!r}f}};
const float eps = {ADAM_EPS!r}f;
float* value = (float*)value_at;
float* exp_avg = (float*)exp_avg_at;
float* exp_avg_sq = (float*)exp_avg_sq_at;
float g = ((const float*)gradient_at)[i];
float m = decays[0] * exp_avg[i] + decays[1] * g;
float v = decays[2] * exp_avg_sq[i] + decays[3] * g * g;
exp_avg[i] = m;
exp_avg_sq[i] = v;
value[i] -= step_size * m / (sqrtf(v) / root_correction + eps);
"""


# Arrays of several types and sizes would be a kernel argument each; addresses are one for all.
@wp.func_native(_STEP)
def step_element(
    value_at: wp.uint64,
    gradient_at: wp.uint64,
    exp_avg_at: wp.uint64,
    exp_avg_sq_at: wp.uint64,
    i: int,
    step_size: float,
    root_correction: float,
): ...


@wp.kernel
def step_parameters(
    first: int,
    addresses: Addresses,
    ends: Ends,
    step_sizes: Numbers,
    root_corrections: Numbers,
):
    """Step one element of any of the parameters, whose elements are numbered consecutively."""
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
    step_element(value, gradient, exp_avg, exp_avg_sq, i - begin, step_size, root_correction)


def in_one_launch(device: torch.device) -> bool:
    """Return whether the parameters of a device share launches."""
    return device.type != "cpu"


def step_together(parameters: Sequence[Stepped]) -> None:
    """Step float32 parameters of one device, eight at a time; results are those of single steps."""
    for start in range(0, len(parameters), MAX_PARAMETERS):
        _launch(parameters[start : start + MAX_PARAMETERS])


def _launch(parameters: Sequence[Stepped]) -> None:
    # Kept until the launch: a gradient may be a copy.
    tensors: list[Tensor] = []
    step_sizes: list[float] = []
    root_corrections: list[float] = []
    for parameter in parameters:
        tensors += [parameter.value, parameter.gradient.contiguous()]
        tensors += [parameter.moments[name] for name in MOMENTS]
        step_size, root_correction = parameter.corrections
        step_sizes.append(step_size)
        root_corrections.append(root_correction)
    addresses = [tensor.data_ptr() for tensor in tensors]
    ends = list(itertools.accumulate(parameter.value.numel() for parameter in parameters))
    n_elements = ends[-1]
    missing = MAX_PARAMETERS - len(parameters)
    arguments = [
        Addresses(*addresses, *[0] * (4 * missing)),
        Ends(*ends, *[2**31 - 1] * missing),
        Numbers(*step_sizes, *[0.0] * missing),
        Numbers(*root_corrections, *[1.0] * missing),
    ]
    device = tensors[0].device
    launch(step_parameters, n_elements, arguments, device=device, min_items=_MIN_ELEMENTS)


@wp.struct
class StepSettings:
    """Numbers of one parameter's step, as of :class:`Stepped`."""

    seed: wp.uint32
    beta1: float
    beta2: float
    step_size: float  # rate over the bias correction of the first moment
    root_correction: float  # root of the bias correction of the second moment
    eps: float


@wp.func
def rounded_to_bf16(x: float, noise: wp.uint32) -> float:
    """Round to one of the two bfloat16 next to x, with mean x, by the low 16 bits of ``noise``."""
    bits = wp.cast(x, wp.uint32) + (noise & _DROPPED_BITS)
    return wp.cast(bits & _KEPT_BITS, wp.float32)


@wp.func
def put(target: Floats, i: int, x: float, noise: wp.uint32):
    """Store a number in the type of its table: float32, or in the overload below bfloat16."""
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
    """Step one element of a parameter; compiled for every combination of types."""
    i = first + wp.tid()
    g = float(grads[i])
    m = s.beta1 * float(exp_avg[i]) + (1.0 - s.beta1) * g
    v = s.beta2 * float(exp_avg_sq[i]) + (1.0 - s.beta2) * g * g
    noise = hashed(s.seed + wp.uint32(i))
    update = s.step_size * m / (wp.sqrt(v) / s.root_correction + s.eps)
    put(values, i, float(values[i]) - update, noise)
    put(exp_avg, i, m, noise >> wp.uint32(16))
    put(exp_avg_sq, i, v, hashed(noise))


def _overloads() -> dict[tuple[torch.dtype, torch.dtype], wp.Kernel]:
    """The kernel by the types of values (and gradients) and of moments."""
    overloads = {}
    for value_type, value_array in _TYPES.items():
        for moment_type, moment_array in _TYPES.items():
            argument_types = {
                "grads": value_array,
                "values": value_array,
                "exp_avg": moment_array,
                "exp_avg_sq": moment_array,
            }
            overloads[value_type, moment_type] = wp.overload(step_elements, argument_types)
    return overloads


_STEP_ELEMENTS = _overloads()


def step_rounding(parameter: Stepped) -> None:
    """Step one parameter whose values or moments are in bfloat16."""
    value = parameter.value
    moments = [parameter.moments[name] for name in MOMENTS]
    settings = StepSettings()
    settings.seed = parameter.seed & 0xFFFFFFFF
    settings.beta1, settings.beta2 = ADAM_BETAS
    settings.step_size, settings.root_correction = parameter.corrections
    settings.eps = ADAM_EPS
    arguments = [
        settings,
        parameter.gradient.detach().contiguous().view(-1),
        value.detach().contiguous().view(-1),
        *[moment.view(-1) for moment in moments],
    ]
    kernel = _STEP_ELEMENTS[value.dtype, moments[0].dtype]
    launch(kernel, value.numel(), arguments, min_items=_MIN_ELEMENTS)


@dataclass
class _Group:
    """State of one parameter."""

    rate: float  # learning rate
    moment_dtype: torch.dtype
    steps: int = 0
    moments: dict[str, Tensor] | None = None  # by name, as ``value``; None before the first step
    moved: bool = False  # whether any step had a gradient


class GroupedAdam:
    """Adam with one parameter group per named tensor, betas (0.9, 0.999), eps 1e-15.

    It owns the parameters, whose rows a model adds and removes through it.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        learning_rates: Mapping[str, float],
        config: OptimizerConfig = DEFAULT_OPTIMIZER,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.parameters: dict[str, Tensor] = {}
        self._groups: dict[str, _Group] = {}
        for name, value in tensors.items():
            self.parameters[name] = _leaf(value.detach().to(config.value_dtype(name), copy=True))
            self._groups[name] = _Group(learning_rates[name], config.moment_dtype(name))
        self._seed = seed
        self._unused: set[str] = set()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates by parameter name."""
        return {name: group.rate for name, group in self._groups.items()}

    def set_learning_rate(self, name: str, value: float) -> None:
        """Change the learning rate of one parameter."""
        self._groups[name].rate = value

    def mark_unused(self, name: str) -> None:
        """Let a parameter that acts on nothing step as with a gradient of zeros."""
        self._unused.add(name)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient or is unused, then drop the gradients."""
        fused: list[Stepped] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None and name not in self._unused:
                continue
            stepped = self._prepare_step(name)
            if stepped is None:
                continue
            if stepped.is_rounded:
                step_rounding(stepped)
            elif in_one_launch(parameter.device):
                fused.append(stepped)
            else:
                _step_by_torch(stepped)
            parameter.grad = None
        step_together(fused)
        self._unused.clear()

    def _prepare_step(self, name: str) -> Stepped | None:
        """Count a step of a parameter; None if neither its values nor its moments change."""
        parameter = self.parameters[name]
        group = self._groups[name]
        group.steps += 1
        if group.moments is None:
            group.moments = {
                moment: torch.zeros_like(parameter, dtype=group.moment_dtype) for moment in MOMENTS
            }
        gradient = parameter.grad
        if gradient is None:
            if not group.moved:
                # Zero moments and a gradient of zeros.
                return None
            gradient = torch.zeros_like(parameter)
        group.moved = True
        stepped = Stepped(
            value=parameter,
            gradient=gradient,
            moments=group.moments,
            rate=group.rate,
            count=group.steps,
            seed=0,
        )
        if not stepped.is_rounded:
            return stepped
        return replace(stepped, seed=derive_seed(self._seed, "rounding", name, group.steps))

    def zero_grad(self) -> None:
        """Drop all gradients, and forget which parameters were unused."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._unused.clear()

    def drop_gradient(self, name: str) -> None:
        """Exclude one parameter from the next step."""
        self.parameters[name].grad = None
        self._unused.discard(name)

    def unused(self) -> frozenset[str]:
        """Names that :meth:`mark_unused` was given since the last step."""
        return frozenset(self._unused)

    def put_gradients(self, gradients: Mapping[str, Tensor], unused: Iterable[str]) -> None:
        """Set the gradients of parameters by name, and mark others as unused."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        self._unused.update(unused)

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients as :meth:`gradients` does, and drop them."""
        gradients = self.gradients()
        self.zero_grad()
        return gradients

    def add_gradients(self, more: Mapping[str, Tensor]) -> None:
        """Add gradients of :meth:`take_gradients`, which must not be used afterwards."""
        for name, gradient in more.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, where there are any."""
        gradients = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        return gradients

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by parameter name, where there are any."""
        moments = {}
        for name, group in self._groups.items():
            if group.moments is not None:
                moments[name] = group.moments
        return moments

    def keep_rows(self, keep: Tensor) -> None:
        """Keep the rows where ``keep`` is true, moments included. keep: (N,) bool"""
        for name in self.parameters:
            self._swap(name, self.parameters[name].detach()[keep], lambda m: m[keep])

    def append_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows with zero moments to every parameter."""
        for name, new in rows.items():
            old = self.parameters[name].detach()
            values = torch.cat([old, new.to(old.dtype)])
            self._swap(name, values, functools.partial(_with_zero_rows, n=new.shape[0]))

    def replace(self, name: str, values: Tensor) -> None:
        """Give one parameter new values and zero moments."""
        dtype = self.config.value_dtype(name)
        self._swap(name, values.detach().to(dtype, copy=True), torch.zeros_like)

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state in torch's format, with one named group per tensor."""
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for index, (name, group) in enumerate(self._groups.items()):
            if group.moments is not None:
                step = torch.tensor(float(group.steps), device="cpu")
                state[index] = {"step": step, **group.moments}
            groups.append({"lr": group.rate, "name": name, **_GROUP_SETTINGS, "params": [index]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state saved by :meth:`state_dict` (or by torch's Adam), in any number type.

        Raises:
            ValueError: Names or shapes are not those of the parameters.
        """
        names = [group.get("name") for group in state["param_groups"]]
        if names != list(self.parameters):
            raise ValueError(f"optimiser groups {names}, expected {list(self.parameters)}")
        for index, (name, group) in enumerate(self._groups.items()):
            saved = state["state"].get(index)
            group.rate = state["param_groups"][index]["lr"]
            if saved is None:
                group.steps = 0
                group.moments = None
                group.moved = False
            else:
                group.steps = int(saved["step"])
                group.moments = self._moments_of(name, saved)
                group.moved = any(bool(moment.any()) for moment in group.moments.values())

    def _moments_of(self, name: str, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        for moment in MOMENTS:
            shape = tuple(saved[moment].shape)
            expected = tuple(parameter.shape)
            if shape != expected:
                raise ValueError(f"{moment} of {name} has shape {shape}, expected {expected}")
        dtype = self._groups[name].moment_dtype
        return {m: saved[m].to(parameter.device, dtype).contiguous() for m in MOMENTS}

    def _swap(self, name: str, values: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the values of a parameter, and its moments by a function of them."""
        group = self._groups[name]
        if group.moments is not None:
            group.moments = {n: change(m).contiguous() for n, m in group.moments.items()}
        self.parameters[name] = _leaf(values)
        self._unused.discard(name)


def _with_zero_rows(values: Tensor, n: int) -> Tensor:
    return torch.cat([values, values.new_zeros(n, *values.shape[1:])])


def _leaf(values: Tensor) -> Tensor:
    return values.detach().contiguous().requires_grad_(True)


def _step_by_torch(parameter: Stepped) -> None:
    """Step by torch's fused kernel, which expects gapless gradients.

    The kernel itself is called: what ``torch.optim`` does before it takes five times as long.
    """
    value = parameter.value
    moments = parameter.moments
    count = torch.full((), float(parameter.count), device=value.device)
    torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
        [value],
        [parameter.gradient.contiguous()],
        [moments["exp_avg"]],
        [moments["exp_avg_sq"]],
        [],
        [count],
        lr=parameter.rate,
        beta1=ADAM_BETAS[0],
        beta2=ADAM_BETAS[1],
        weight_decay=0.0,
        eps=ADAM_EPS,
        amsgrad=False,
        maximize=False,
    )
