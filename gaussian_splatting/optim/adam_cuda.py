# SPDX-License-Identifier: Apache-2.0
"""One Adam step of several float32 parameters in one launch, for GPUs, where launches cost most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.optim.moments import ADAM_BETAS, ADAM_EPS, MOMENTS, AdamStep, corrections
from sugar_utils.warp_launch import launch

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

MAX_PARAMETERS = 8  # in one launch
_GROUPS = wp.constant(MAX_PARAMETERS)
_MIN_ELEMENTS = 16_384
Addresses = wp.types.vector(length=4 * MAX_PARAMETERS, dtype=wp.uint64)
Ends = wp.types.vector(length=MAX_PARAMETERS, dtype=wp.int32)
Numbers = wp.types.vector(length=MAX_PARAMETERS, dtype=wp.float32)


@dataclass(frozen=True)
class Stepped:
    """A parameter and its step."""

    value: Tensor  # changed in place, (N, ...) float32
    gradient: Tensor
    moments: dict[str, Tensor]  # changed in place, float32
    step: AdamStep


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


def is_plain(parameter: Stepped) -> bool:
    """Whether a parameter can be: all of it float32 and without gaps, and all rows step."""
    tensors = (parameter.value, *parameter.moments.values())
    plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    return plain and parameter.step.seen is None


def step_together(parameters: Sequence[Stepped]) -> None:
    """Step parameters of one device, eight at a time; each as by itself."""
    for start in range(0, len(parameters), MAX_PARAMETERS):
        _launch(parameters[start : start + MAX_PARAMETERS])


def _launch(parameters: Sequence[Stepped]) -> None:
    # Held until the launch: a gradient may be a copy.
    tensors = [
        t
        for p in parameters
        for t in (p.value, p.gradient.contiguous(), *(p.moments[name] for name in MOMENTS))
    ]
    factors = [corrections(p.step) for p in parameters]
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
