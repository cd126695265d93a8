# SPDX-License-Identifier: Apache-2.0
"""Adam's step of one or several parameters, in float32 or bfloat16.

On a GPU launches cost most, so all float32 parameters share one. Values or moments in bfloat16 are
read in the type they are stored in, stepped in float32, and written back. The step uses the new
moments before they are rounded. Rounding is stochastic, because a moment changes by less than its
spacing: a number goes to one of its two neighbours with a probability that keeps the mean. The
random bits are a hash of the seed of the step and the number of the element, so they depend neither
on threads nor on the past.

What changes from step to step is read on the device, where a recorded launch finds it when it is
repeated, see :class:`StepInputs`.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportRedeclaration=false

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import warp as wp
from torch import Tensor

from sugar_utils.device import upload
from sugar_utils.warp_arrays import Bools, Floats, Ints
from sugar_utils.warp_launch import Kernel, launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-15
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_PARAMETERS = 8  # in one launch
_BETA1 = wp.constant(ADAM_BETAS[0])
_BETA2 = wp.constant(ADAM_BETAS[1])
_EPS = wp.constant(ADAM_EPS)
_GROUPS = wp.constant(MAX_PARAMETERS)
_MIN_ELEMENTS = 16_384
_N_ADDRESSES = wp.constant(5)  # of a parameter
Addresses = wp.types.vector(length=5 * MAX_PARAMETERS, dtype=wp.uint64)
Ends = wp.types.vector(length=MAX_PARAMETERS, dtype=wp.int32)
# Typed here: inside a kernel such a literal is a signed integer, and a compiler warns.
_DROPPED_BITS = wp.constant(wp.uint32(0xFFFF))
_KEPT_BITS = wp.constant(wp.uint32(0xFFFF0000))

_TYPES = {torch.float32: wp.array(dtype=float), torch.bfloat16: wp.array(dtype=wp.bfloat16)}


class StepInputs(NamedTuple):
    """Numbers that kernels read for a step, on the device of the parameter."""

    numbers: Tensor  # see step_numbers; (3,) int32
    step_mask: Tensor  # false: nothing is changed. (1,) bool


class ParameterState(NamedTuple):
    """One parameter and the arguments of its step, besides the gradient."""

    value: Tensor  # changed in place, (N, ...) float32 or bfloat16
    moments: dict[str, Tensor]  # changed in place, both of one type, float32 or bfloat16
    rate: float  # learning rate
    count: int  # steps of the parameter, this one included
    # Of the stochastic rounding; any number for float32, which is not rounded, or where the seed is
    # on the device.
    seed: int
    on_device: StepInputs | None = None  # rate, count and seed for kernels; None: they are sent

    @property
    def is_rounded(self) -> bool:
        """Whether values or moments are stored in fewer bits than they are computed in."""
        return {self.value.dtype, self.moments[MOMENTS[0]].dtype} != {torch.float32}

    def inputs(self) -> StepInputs:
        """Rate, count and seed on the device."""
        if self.on_device is not None:
            return self.on_device
        device = self.value.device
        numbers = upload(step_numbers([(self.rate, self.count, self.seed)]), device)
        return StepInputs(numbers[0], torch.ones(1, dtype=torch.bool, device=device))

    def rows(self, rows: slice) -> ParameterState:
        """A subset of rows; updating them alone gives the bits of a full step.

        Raises:
            ValueError: The seed is on the device, where rows cannot change it.
        """
        if self.on_device is not None:
            raise ValueError("rows are stepped by numbers of the host")
        elements_per_row = self.value.numel() // max(1, len(self.value))
        return self._replace(
            value=self.value.detach()[rows],
            moments={name: moment[rows] for name, moment in self.moments.items()},
            # Random bits are those of the seed plus the number of the element.
            seed=self.seed + rows.start * elements_per_row,
        )


def step_numbers(steps: Sequence[tuple[float, int, int]]) -> Tensor:
    """Write the numbers of steps into one table, copied to the device at once.

    Args:
        steps: Learning rate, number of the step from 1 and seed of each parameter.

    Returns:
        The rate over the bias correction of the first moment, and the root of that of the second,
        as the bits of float32; the seed. (P, 3) int32, on the CPU
    """
    table = np.empty((len(steps), 3), dtype=np.uint32)
    fractions = table.view(np.float32)
    for row, (rate, count, seed) in enumerate(steps):
        fractions[row, 0] = rate / (1.0 - ADAM_BETAS[0] ** count)
        fractions[row, 1] = (1.0 - ADAM_BETAS[1] ** count) ** 0.5
        table[row, 2] = seed & 0xFFFFFFFF
    return torch.from_numpy(table.view(np.int32))


class Stepped(NamedTuple):
    """One parameter with its gradient."""

    state: ParameterState
    gradient: Tensor  # as the values, (N, ...)


# The weights of what is new are computed here: 1 - 0.999 in float32 is wrong in its sixth digit.
_STEP = f"""
const float decays[4] = {{{ADAM_BETAS[0]!r}f, {1.0 - ADAM_BETAS[0]!r}f,
                         {ADAM_BETAS[1]!r}f, {1.0 - ADAM_BETAS[1]!r}f}};
const float eps = {ADAM_EPS!r}f;
float* value = (float*)value_at;
float* exp_avg = (float*)exp_avg_at;
float* exp_avg_sq = (float*)exp_avg_sq_at;
const float* numbers = (const float*)numbers_at;
float g = ((const float*)gradient_at)[i];
float m = decays[0] * exp_avg[i] + decays[1] * g;
float v = decays[2] * exp_avg_sq[i] + decays[3] * g * g;
exp_avg[i] = m;
exp_avg_sq[i] = v;
value[i] -= numbers[0] * m / (sqrtf(v) / numbers[1] + eps);
"""


# Arrays of several types and sizes would be a kernel argument each; addresses are one for all.
@wp.func_native(_STEP)
def step_element(
    value_at: wp.uint64,
    gradient_at: wp.uint64,
    exp_avg_at: wp.uint64,
    exp_avg_sq_at: wp.uint64,
    numbers_at: wp.uint64,
    i: int,
): ...


@wp.kernel
def step_parameters(first: int, step_mask: Bools, addresses: Addresses, ends: Ends):
    """Step one element of any of the parameters, whose elements are numbered consecutively."""
    i = first + wp.tid()
    if not step_mask[0]:
        return
    begin = int(0)
    value = addresses[0]
    gradient = addresses[1]
    exp_avg = addresses[2]
    exp_avg_sq = addresses[3]
    numbers = addresses[4]
    # Unrolled, and chosen one after the other: an index that is computed would send all of these
    # to memory.
    for k in range(1, _GROUPS):
        if i >= ends[k - 1]:
            begin = ends[k - 1]
            value = addresses[_N_ADDRESSES * k]
            gradient = addresses[_N_ADDRESSES * k + 1]
            exp_avg = addresses[_N_ADDRESSES * k + 2]
            exp_avg_sq = addresses[_N_ADDRESSES * k + 3]
            numbers = addresses[_N_ADDRESSES * k + 4]
    step_element(value, gradient, exp_avg, exp_avg_sq, numbers, i - begin)


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
    for parameter in parameters:
        tensors += [parameter.state.value, parameter.gradient.contiguous()]
        tensors += [parameter.state.moments[name] for name in MOMENTS]
        tensors.append(parameter.state.inputs().numbers)
    addresses = [tensor.data_ptr() for tensor in tensors]
    ends = list(itertools.accumulate(parameter.state.value.numel() for parameter in parameters))
    n_elements = ends[-1]
    n_missing = MAX_PARAMETERS - len(parameters)
    arguments = [
        parameters[0].state.inputs().step_mask,
        Addresses(*addresses, *[0] * (_N_ADDRESSES * n_missing)),
        Ends(*ends, *[2**31 - 1] * n_missing),
    ]
    device = tensors[0].device
    launch(step_parameters, n_elements, arguments, device=device, min_items=_MIN_ELEMENTS)


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
    numbers: Ints,
    step_mask: Bools,
    grads: wp.array(dtype=Any),
    values: wp.array(dtype=Any),
    exp_avg: wp.array(dtype=Any),
    exp_avg_sq: wp.array(dtype=Any),
):
    """Step one element of a parameter; compiled for every combination of types."""
    i = first + wp.tid()
    if not step_mask[0]:
        return
    step_size = wp.cast(numbers[0], wp.float32)
    root_correction = wp.cast(numbers[1], wp.float32)
    g = float(grads[i])
    m = _BETA1 * float(exp_avg[i]) + (1.0 - _BETA1) * g
    v = _BETA2 * float(exp_avg_sq[i]) + (1.0 - _BETA2) * g * g
    noise = hashed(wp.uint32(numbers[2]) + wp.uint32(i))
    update = step_size * m / (wp.sqrt(v) / root_correction + _EPS)
    put(values, i, float(values[i]) - update, noise)
    put(exp_avg, i, m, noise >> wp.uint32(16))
    put(exp_avg_sq, i, v, hashed(noise))


def by_formats(
    kernel: Kernel, arrays: Mapping[torch.dtype, object], values: Sequence[str] = ("values",)
) -> dict[tuple[torch.dtype, torch.dtype], Kernel]:
    """Return the overloads of a kernel by the types of values and of moments.

    Args:
        kernel: It has arguments ``exp_avg`` and ``exp_avg_sq``.
        arrays: Warp's type of an argument by the type of its tensor.
        values: Arguments of the type of values.
    """
    overloads = {}
    for value_type, value_array in arrays.items():
        for moment_type, moment_array in arrays.items():
            argument_types = dict.fromkeys(values, value_array)
            argument_types.update(dict.fromkeys(MOMENTS, moment_array))
            overloads[value_type, moment_type] = wp.overload(kernel, argument_types)
    return overloads


_STEP_ELEMENTS = by_formats(step_elements, _TYPES, ("grads", "values"))


def step_rounding(parameter: Stepped) -> None:
    """Step one parameter whose values or moments are in bfloat16."""
    value = parameter.state.value
    moments = [parameter.state.moments[name] for name in MOMENTS]
    inputs = parameter.state.inputs()
    arguments = [
        inputs.numbers,
        inputs.step_mask,
        parameter.gradient.detach().contiguous().view(-1),
        value.detach().contiguous().view(-1),
        *[moment.view(-1) for moment in moments],
    ]
    kernel = _STEP_ELEMENTS[value.dtype, moments[0].dtype]
    launch(kernel, value.numel(), arguments, min_items=_MIN_ELEMENTS)


def step_alone(parameter: Stepped) -> None:
    """Step one parameter of the CPU, or a rounded one of any device."""
    if parameter.state.is_rounded:
        step_rounding(parameter)
    else:
        step_by_torch(parameter)


def step_by_torch(parameter: Stepped) -> None:
    """Step by torch's fused kernel, which expects gapless gradients.

    The kernel itself is called: what ``torch.optim`` does before it takes five times as long.
    """
    value = parameter.state.value
    moments = parameter.state.moments
    count = torch.full((), float(parameter.state.count), device=value.device)
    torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
        [value],
        [parameter.gradient.contiguous()],
        [moments["exp_avg"]],
        [moments["exp_avg_sq"]],
        [],
        [count],
        lr=parameter.state.rate,
        beta1=ADAM_BETAS[0],
        beta2=ADAM_BETAS[1],
        weight_decay=0.0,
        eps=ADAM_EPS,
        amsgrad=False,
        maximize=False,
    )
