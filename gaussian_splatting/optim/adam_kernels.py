# SPDX-License-Identifier: Apache-2.0
"""Warp kernels of one Adam step: float32 parameters in one launch, and parameters in bfloat16.

On a GPU launches cost most, so all float32 parameters share one. Values or moments in bfloat16 are
read in the type they are stored in, stepped in float32, and written back. The step uses the new
moments before they are rounded. Rounding is stochastic, because a moment changes by less than its
spacing: a number goes to one of its two neighbours with a probability that keeps the mean. The
random bits are a hash of the seed of the step and the number of the element, so they depend neither
on threads nor on the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import warp as wp
from torch import Tensor

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


@dataclass(frozen=True)
class AdamStep:
    rate: float
    count: int
    seed: int

    @property
    def corrections(self) -> tuple[float, float]:
        """Rate over the bias correction of the first moment, and the root of the second's."""
        size = self.rate / (1.0 - ADAM_BETAS[0] ** self.count)
        return size, (1.0 - ADAM_BETAS[1] ** self.count) ** 0.5


@dataclass(frozen=True)
class Stepped:
    """A parameter and its step."""

    value: Tensor  # changed in place, (N, ...) float32 or bfloat16
    gradient: Tensor
    moments: dict[str, Tensor]  # changed in place, both of one type, float32 or bfloat16
    step: AdamStep

    @property
    def is_float32(self) -> bool:
        return all(t.dtype == torch.float32 for t in (self.value, *self.moments.values()))


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
    value_at: wp.uint64, gradient_at: wp.uint64, exp_avg_at: wp.uint64, exp_avg_sq_at: wp.uint64,
    i: int, step_size: float, root_correction: float, decays: wp.vec4, eps: float,
): ...  # fmt: skip


@wp.kernel
def step_parameters(
    first: int, addresses: Addresses, ends: Ends, step_sizes: Numbers, root_corrections: Numbers,
    decays: wp.vec4, eps: float,
):  # fmt: skip
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
        value, gradient, exp_avg, exp_avg_sq, i - begin, step_size, root_correction, decays, eps,
    )  # fmt: skip


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
    factors = [p.step.corrections for p in parameters]
    ends, total = [], 0
    for p in parameters:
        total += p.value.numel()
        ends.append(total)
    missing = MAX_PARAMETERS - len(parameters)
    launch(
        step_parameters,
        total,
        [
            Addresses(*(t.data_ptr() for t in tensors), *[0] * (4 * missing)),
            Ends(*ends, *[2**31 - 1] * missing),
            Numbers(*(size for size, _ in factors), *[0.0] * missing),
            Numbers(*(root for _, root in factors), *[1.0] * missing),
            wp.vec4(*(share for beta in ADAM_BETAS for share in (beta, 1.0 - beta))),
            ADAM_EPS,
        ],
        device=tensors[0].device,
        min_items=_MIN_ELEMENTS,
    )


@wp.struct
class StepSettings:
    """What all elements of one step share."""

    seed: wp.uint32
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float


@wp.func_native("""
union { float number; unsigned int bits; } pun;
pun.number = x;
return pun.bits;
""")
def bits_of(x: float) -> wp.uint32: ...


@wp.func_native("""
union { float number; unsigned int bits; } pun;
pun.bits = bits;
return pun.number;
""")
def float_of(bits: wp.uint32) -> float: ...


@wp.func
def noise_of(seed: wp.uint32, element: int) -> wp.uint32:
    """Random bits of one element in one step."""
    return hashed(seed + wp.uint32(element))


@wp.func
def rounded_to_bf16(x: float, noise: wp.uint32) -> float:
    """One of the two bfloat16 next to x, with mean x; the low 16 bits of ``noise`` decide."""
    return float_of((bits_of(x) + (noise & _DROPPED_BITS)) & _KEPT_BITS)


@wp.func
def put(target: Floats, i: int, x: float, noise: wp.uint32):
    target[i] = x


@wp.func
def put(target: wp.array(dtype=wp.bfloat16), i: int, x: float, noise: wp.uint32):  # noqa: F811
    target[i] = wp.bfloat16(rounded_to_bf16(x, noise))


@wp.kernel
def step_elements(
    first: int, s: StepSettings, grads: wp.array(dtype=Any), values: wp.array(dtype=Any),
    exp_avg: wp.array(dtype=Any), exp_avg_sq: wp.array(dtype=Any),
):  # fmt: skip
    i = first + wp.tid()
    g = float(grads[i])
    m = s.beta1 * float(exp_avg[i]) + (1.0 - s.beta1) * g
    v = s.beta2 * float(exp_avg_sq[i]) + (1.0 - s.beta2) * g * g
    noise = noise_of(s.seed, i)
    update = s.step_size * m / (wp.sqrt(v) / s.root_correction + s.eps)
    put(values, i, float(values[i]) - update, noise)
    put(exp_avg, i, m, noise >> wp.uint32(16))
    put(exp_avg_sq, i, v, hashed(noise))


_TYPES = {torch.float32: wp.array(dtype=float), torch.bfloat16: wp.array(dtype=wp.bfloat16)}
_STEP_ELEMENTS = {
    (of_values, of_moments): wp.overload(
        step_elements,
        {"grads": values, "values": values, "exp_avg": moments, "exp_avg_sq": moments},
    )
    for of_values, values in _TYPES.items()
    for of_moments, moments in _TYPES.items()
}
"""By the types of values (and gradients) and of moments."""


def step_rounding(parameter: Stepped) -> None:
    """Step one parameter of which values or moments are in bfloat16."""
    value, moments = parameter.value, parameter.moments
    settings = StepSettings()
    settings.seed = parameter.step.seed & 0xFFFFFFFF
    settings.beta1, settings.beta2 = ADAM_BETAS
    settings.step_size, settings.root_correction = parameter.step.corrections
    settings.eps = ADAM_EPS
    tensors = [t.detach().contiguous().view(-1) for t in (parameter.gradient, value)]
    tensors += [moments[name].view(-1) for name in MOMENTS]
    kernel = _STEP_ELEMENTS[value.dtype, moments[MOMENTS[0]].dtype]
    launch(kernel, value.numel(), [settings, *tensors], min_items=_MIN_ELEMENTS)
