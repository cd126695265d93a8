# SPDX-License-Identifier: Apache-2.0
"""Adam's step of one or several parameters, in float32 or bfloat16.

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

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from sugar_utils.warp_arrays import Floats
from sugar_utils.warp_launch import Kernel, launch
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


class ParameterState(NamedTuple):
    """One parameter and the arguments of its step, besides the gradient."""

    value: Tensor  # changed in place, (N, ...) float32 or bfloat16
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

    def rows(self, rows: slice) -> ParameterState:
        """Some rows; stepped by themselves they become what they become in the whole."""
        first_element = rows.start * (self.value.numel() // max(1, len(self.value)))
        return ParameterState(
            value=self.value.detach()[rows],
            moments={name: moment[rows] for name, moment in self.moments.items()},
            rate=self.rate,
            count=self.count,
            # Noise is a hash of the seed plus the number of the element.
            seed=self.seed + first_element,
        )


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
        tensors += [parameter.state.value, parameter.gradient.contiguous()]
        tensors += [parameter.state.moments[name] for name in MOMENTS]
        step_size, root_correction = parameter.state.corrections
        step_sizes.append(step_size)
        root_corrections.append(root_correction)
    addresses = [tensor.data_ptr() for tensor in tensors]
    ends = list(itertools.accumulate(parameter.state.value.numel() for parameter in parameters))
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
    settings = StepSettings()
    settings.seed = parameter.state.seed & 0xFFFFFFFF
    settings.beta1, settings.beta2 = ADAM_BETAS
    settings.step_size, settings.root_correction = parameter.state.corrections
    settings.eps = ADAM_EPS
    arguments = [
        settings,
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
