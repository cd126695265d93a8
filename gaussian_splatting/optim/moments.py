# SPDX-License-Identifier: Apache-2.0
"""Adam's moments of one parameter in their storage formats: stepping, and their form in files.

The moments of a parameter are tensors by name whose first dimension is the parameter's. In files
``exp_avg`` and ``exp_avg_sq`` have the parameter's shape and hold float32 or bfloat16, as any Adam
of torch takes; 8-bit moments are bfloat16 beside the scales of their rows, from which the very
codes come back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from gaussian_splatting.optim.adam_kernels import (
    ENCODE_ROWS,
    STEP_ELEMENTS,
    STEP_ROWS,
    StepSettings,
    decode_rows,
)
from gaussian_splatting.optim.optimizer_config import StateFormat
from sugar_utils.warp_launch import launch

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-15
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_MIN_ELEMENTS = 16_384
_MIN_ROWS = 512


@dataclass(frozen=True)
class AdamStep:
    rate: float
    count: int
    seed: int
    seen: Tensor | None = None  # rows that take part; None for all, (N,) bool


class PlainMoments:
    """Moments as numbers of one type. dtype: float32 or bfloat16"""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def zeros(self, like: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(like, dtype=self._dtype) for name in MOMENTS}

    def step(self, value: Tensor, grad: Tensor, moments: dict[str, Tensor], step: AdamStep) -> None:
        """Change both in place: by torch where all is float32 and steps; else by one kernel."""
        if value.dtype == self._dtype == torch.float32 and step.seen is None:
            _step_by_torch(value, grad, moments, step)
            return
        kernel = STEP_ELEMENTS[_is_half(value.dtype), _is_half(self._dtype)]
        _launch_step(kernel, value.numel(), value, grad, moments, step, _MIN_ELEMENTS)

    def to_file(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(moments)

    def from_file(self, saved: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Moments of a checkpoint in any format, rounded to nearest where they are finer."""
        return {n: saved[n].to(like.device, self._dtype).contiguous() for n in MOMENTS}


class BlockMoments:
    """Moments in 8 bits with one scale per row; see :mod:`.adam_kernels`."""

    def zeros(self, like: Tensor) -> dict[str, Tensor]:
        types = (torch.int8, torch.uint8)
        codes = {
            n: torch.zeros_like(like, dtype=t, memory_format=torch.contiguous_format)
            for n, t in zip(MOMENTS, types, strict=True)
        }
        scales = {n: like.new_zeros(like.shape[0], dtype=torch.bfloat16) for n in SCALES}
        return {**codes, **scales}

    def step(self, value: Tensor, grad: Tensor, moments: dict[str, Tensor], step: AdamStep) -> None:
        moments = {name: moments[name] for pair in zip(MOMENTS, SCALES, strict=True)
                   for name in pair}  # fmt: skip
        kernel = STEP_ROWS[_is_half(value.dtype)]
        _launch_step(kernel, value.shape[0], value, grad, moments, step, _MIN_ROWS)

    def to_file(self, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        """bfloat16 moments and the scales, on the CPU: the device needs no extra memory."""
        codes, scales = ([moments[n].cpu() for n in names] for names in (MOMENTS, SCALES))
        plain = [torch.empty(c.shape, dtype=torch.bfloat16, device="cpu") for c in codes]
        lists = [*_interleaved(codes, scales), *(p.view(-1) for p in plain)]
        arguments = [_width(plain[0]), *lists]
        launch(decode_rows, plain[0].numel(), arguments, min_items=_MIN_ELEMENTS)
        return dict(zip((*MOMENTS, *SCALES), (*plain, *scales), strict=True))

    def from_file(self, saved: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """The codes that were saved, or the nearest ones to moments of another format."""
        moments = self.zeros(like)
        # Foreign files may hold other types; what is not bfloat16 becomes float32.
        half = all(_is_half(saved[n].dtype) for n in MOMENTS)
        given = [
            saved[n].to(like.device, torch.bfloat16 if half else torch.float32).contiguous()
            for n in MOMENTS
        ]
        has_scales = all(n in saved for n in SCALES)
        if has_scales:
            moments.update({n: saved[n].to(like.device).contiguous() for n in SCALES})
        launch(
            ENCODE_ROWS[half],
            like.shape[0],
            [
                _width(like), int(has_scales), *(g.view(-1) for g in given),
                *_interleaved([moments[n] for n in MOMENTS], [moments[n] for n in SCALES]),
            ],
            min_items=_MIN_ROWS,
        )  # fmt: skip
        return moments


MomentFormat = PlainMoments | BlockMoments  # a way to store the moments of a parameter


def moment_format(name: StateFormat) -> MomentFormat:
    if name == "8bit":
        return BlockMoments()
    return PlainMoments(torch.bfloat16 if name == "bf16" else torch.float32)


def _step_by_torch(value: Tensor, grad: Tensor, moments: dict[str, Tensor], step: AdamStep) -> None:
    """The fused kernel of torch; it counts the steps itself, and takes gradients for gapless."""
    before = torch.full((), step.count - 1.0, device=value.device)
    adam(
        [value], [grad.contiguous()], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [before],
        fused=True, amsgrad=False, beta1=ADAM_BETAS[0], beta2=ADAM_BETAS[1], lr=step.rate,
        weight_decay=0.0, eps=ADAM_EPS, maximize=False,
    )  # fmt: skip


def _launch_step(
    kernel,
    n_items: int,
    value: Tensor,
    grad: Tensor,
    moments: dict[str, Tensor],
    step: AdamStep,
    min_items: int,
) -> None:
    seen = step.seen
    if seen is None:
        seen = torch.empty(0, dtype=torch.bool, device=value.device)
    lists = [t.detach().contiguous().view(-1) for t in (grad, value)]
    lists += [m.view(-1) for m in moments.values()]
    arguments = [_settings(step, _width(value)), seen.contiguous().view(torch.uint8), *lists]
    launch(kernel, n_items, arguments, min_items=min_items)


def corrections(step: AdamStep) -> tuple[float, float]:
    """Rate over the bias correction of the first moment, and the root of that of the second."""
    size = step.rate / (1.0 - ADAM_BETAS[0] ** step.count)
    return size, (1.0 - ADAM_BETAS[1] ** step.count) ** 0.5


def _settings(step: AdamStep, width: int) -> StepSettings:
    settings = StepSettings()
    settings.seed = step.seed & 0xFFFFFFFF
    settings.width = width
    settings.sparse = int(step.seen is not None)
    settings.beta1, settings.beta2 = ADAM_BETAS
    settings.step_size, settings.root_correction = corrections(step)
    settings.eps = ADAM_EPS
    return settings


def _interleaved(codes: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    return [codes[0].view(-1), scales[0], codes[1].view(-1), scales[1]]


def _width(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _is_half(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16
