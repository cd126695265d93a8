# SPDX-License-Identifier: Apache-2.0
"""Checks that stop training when its numbers go bad, before they are saved or exported.

:func:`check_step` and :func:`check_parameters` cost one synchronisation with the device when all is
well. What exactly is wrong is looked up only after that.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.projection import (
    PredictedCount,
    PredictionMissed,
)
from sugar_utils.device import SentNumbers
from sugar_utils.errors import TrainingError
from sugar_utils.warp_arrays import Bools, Floats
from sugar_utils.warp_launch import launch

wp.set_module_options({"enable_backward": False})

MAX_SCALE_IN_EXTENTS = 1e4
PARAMETER_INTERVAL = 8
"""Iterations between two checks of all parameters; gradients and scales are checked in each."""

TOTAL = "loss"  # name under which stages report the weighted sum of their terms
_ROW_LIMIT = 3
_KEPT = "the last good checkpoint is kept"
_LOOK = "look at this image and its pose, or continue from it with lower learning rates"


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one view that are checked before the optimiser's step."""

    losses: Mapping[str, Tensor]  # scalars by name
    gradients: Mapping[str, Tensor | None]  # by name of the parameter
    parameters: Mapping[str, Tensor]  # among them ``"log_scales"``
    extent: float  # size of the capture in world units; not positive means unknown
    radii: Tensor  # in pixels, 0 where invisible. (N,)
    predicted: Sequence[PredictedCount] = ()  # numbers that the host did not wait for


def probes_of(numbers: StepNumbers, *, with_parameters: bool = False) -> Tensor:
    """Condense the numbers of a view into few, on their device.

    Returns:
        Norms of gradients (and parameters), losses, least and largest scale, largest radius,
        by how much predicted numbers were too low. (n,) float32
    """
    tensors = [*numbers.gradients.values()]
    if with_parameters:
        tensors = [*numbers.parameters.values(), *tensors]
    probes = _norm_probes(tensors)
    probes += [value.detach().reshape(()) for value in numbers.losses.values()]
    log_scales = numbers.parameters["log_scales"]
    if log_scales.numel():
        # The smallest and the largest entry; both propagate NaN.
        probes += log_scales.detach().aminmax()
    if numbers.radii.numel():
        probes.append(numbers.radii.detach().amax())
    probes += [guess.excess for guess in numbers.predicted if guess.excess is not None]
    # On a GPU, numbers of several types would be copied one by one.
    return torch.stack([probe.float() for probe in probes])


@wp.kernel
def judge_probes(
    first: int,
    probes: Floats,
    n_finite: int,
    largest_scale: int,
    scale_limit: float,
    step_mask: Bools,
):
    """Judge all probes, in one thread; numbers from ``n_finite`` on may not be positive."""
    is_good = step_mask[0]
    for k in range(probes.shape[0]):
        if not wp.isfinite(probes[k]) or (k >= n_finite and probes[k] > 0.0):
            is_good = False
    if largest_scale >= 0 and probes[largest_scale] > scale_limit:
        is_good = False
    step_mask[0] = is_good


def judge(numbers: StepNumbers, probes: Tensor, step_mask: Tensor) -> None:
    """Judge the probes on the device as :func:`check_step` does on the host.

    Args:
        step_mask: Becomes false where a number is bad, and stays so. (1,) bool
    """
    n_excesses = sum(guess.excess is not None for guess in numbers.predicted)
    n_finite = len(probes) - n_excesses
    largest_scale = -1
    if numbers.parameters["log_scales"].numel():
        largest_scale = n_finite - (2 if numbers.radii.numel() else 1)
    limit = _log_limit(numbers.extent)
    launch(judge_probes, 1, [probes, n_finite, largest_scale, limit, step_mask])


class ReadProbes(NamedTuple):
    """What the host reads from the probes of a view."""

    are_good: bool  # all numbers
    shows_any: bool  # Gaussian


def read_probes(numbers: StepNumbers, probes: Tensor | SentNumbers) -> ReadProbes:
    """Read the probes of a view; its gradients and losses may be those of a later one.

    Raises:
        PredictionMissed: A predicted number was too low; the view does not count.
    """
    values: list[float] = probes.tolist()
    guesses = [guess for guess in numbers.predicted if guess.excess is not None]
    were_enough = [guess.record(values.pop()) for guess in reversed(guesses)]
    if not all(were_enough):
        raise PredictionMissed
    shows_any = bool(numbers.radii.numel()) and values.pop() > 0
    largest_scale = values[-1] if numbers.parameters["log_scales"].numel() else -math.inf
    is_finite = all(map(math.isfinite, values))
    return ReadProbes(is_finite and largest_scale <= _log_limit(numbers.extent), shows_any)


def check_step(
    numbers: StepNumbers,
    iteration: int,
    camera_name: str,
    *,
    look_at_parameters: bool = True,
    probes: Tensor | SentNumbers | None = None,
) -> bool:
    """Make all checks of one view with one synchronisation.

    Call it after the backward passes and before the optimiser's step, so that bad numbers never
    reach the parameters. The first check that fails raises: parameters, losses, gradients, scales.

    Args:
        look_at_parameters: Or only where something else is bad.
        probes: From :func:`probes_of`, without parameters, where a recording has made them.

    Returns:
        Whether the view shows any Gaussian.

    Raises:
        PredictionMissed: A predicted number was too low; the view does not count.
        TrainingError: A number is bad.
    """
    if probes is None:
        probes = probes_of(numbers, with_parameters=look_at_parameters)
        look_at_parameters = False
    found = read_probes(numbers, probes)
    if not found.are_good:
        check_parameters(numbers.parameters, iteration, camera_name)
        check_losses(numbers.losses, iteration, camera_name)
        check_gradients(numbers.gradients, iteration, camera_name)
        log_scales = numbers.parameters["log_scales"]
        check_scales(log_scales, numbers.extent, iteration, camera_name)
    if look_at_parameters:
        check_parameters(numbers.parameters, iteration, camera_name)
    return found.shows_any


def check_parameters(named: Mapping[str, Tensor], iteration: int, camera_name: str) -> None:
    """Stop on a parameter that is not finite; renderers leave such Gaussians out in silence.

    Parameters are given by name, (N, ...) each and on one device.
    """
    if not all(map(math.isfinite, _read(_norm_probes(named.values())))):
        advice = "continue from it with lower learning rates"
        _check_rows("parameter", named, advice, iteration, camera_name)


def check_losses(terms: Mapping[str, Tensor], iteration: int, camera_name: str) -> None:
    """Stop on a loss term that is not a finite number; names the first one and its value."""
    # The sum comes last: it is bad whenever a term is, and names nothing.
    for name in sorted(terms, key=lambda name: name == TOTAL):
        number = float(terms[name].detach())
        if not math.isfinite(number):
            where = _where(iteration, camera_name)
            raise TrainingError(f"loss term {name} is {number} {where}; {_KEPT}: {_LOOK}")


def check_gradients(named: Mapping[str, Tensor | None], iteration: int, camera_name: str) -> None:
    """Stop on a gradient that is not finite; (N, ...) by parameter name, None where absent."""
    _check_rows("gradient of", named, _LOOK, iteration, camera_name)


def check_scales(log_scales: Tensor, extent: float, iteration: int, camera_name: str) -> None:
    """Stop on Gaussians that are not finite or exceed ``MAX_SCALE_IN_EXTENTS`` times the scene.

    Args:
        log_scales: Logarithms of the standard deviations. (N, 3)
        extent: Size of the capture in world units; not positive means unknown.
    """
    values = log_scales.detach()
    rows = _rows_of(~(values <= _log_limit(extent)) | ~values.isfinite())
    if len(rows) == 0:
        return
    worst = float(values[rows].float().max())
    limit = f"{MAX_SCALE_IN_EXTENTS:g} times the scene extent {extent:g}"
    raise TrainingError(
        f"scales out of bounds: log_scales reaches {worst:g}, bad in {_describe(rows, values)}, "
        f"the limit is {limit}, {_where(iteration, camera_name)}; "
        f"{_KEPT}: continue from it with a lower scale learning rate, or check the scene's poses"
    )


def check_population(n_gaussians: int, iteration: int, event: str = "pruning") -> None:
    """Stop where no Gaussian is left after an event."""
    if n_gaussians < 1:
        raise TrainingError(
            f"no Gaussians left after {event} at iteration {iteration}; {_KEPT}: "
            "start from a model with more opaque Gaussians (more vanilla iterations, or another "
            "--iteration_to_load)"
        )


def _check_rows(
    kind: str, named: Mapping[str, Tensor | None], advice: str, iteration: int, camera_name: str
) -> None:
    """Name the first bad tensor and how many rows (Gaussians) of it are bad."""
    for name, tensor in named.items():
        if tensor is None:
            continue
        rows = _rows_of(~tensor.detach().isfinite())
        if len(rows) > 0:
            raise TrainingError(
                f"{kind} {name} is not finite in {_describe(rows, tensor)} "
                f"{_where(iteration, camera_name)}; {_KEPT}: {advice}"
            )


def _read(probes: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers: the one synchronisation."""
    return torch.stack(probes).tolist() if probes else []


def _norm_probes(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Norms, each finite only if every entry is."""
    present = [t.detach() for t in tensors if t is not None and t.numel() > 0]
    if not present:
        return []
    return list(torch._foreach_norm(present, 2.0))  # pyright: ignore[reportPrivateImportUsage]


def _log_limit(extent: float) -> float:
    return math.log(MAX_SCALE_IN_EXTENTS * extent) if extent > 0 else math.inf


def _rows_of(bad: Tensor) -> Tensor:
    return (bad if bad.dim() else bad[None]).nonzero()[:, 0].unique()


def _describe(rows: Tensor, tensor: Tensor) -> str:
    first = ", ".join(str(row) for row in rows[:_ROW_LIMIT].tolist())
    return f"{len(rows)} of {len(tensor) if tensor.dim() else 1} rows (first: {first})"


def _where(iteration: int, camera_name: str) -> str:
    return f"at iteration {iteration}, camera {camera_name}"
