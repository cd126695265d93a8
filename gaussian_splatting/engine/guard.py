# SPDX-License-Identifier: Apache-2.0
"""Checks that stop training when its numbers go bad, before they are saved or exported.

:func:`check_step` and :func:`check_parameters` cost one synchronisation with the device when all is
well. What exactly is wrong is looked up only after that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gaussian_splatting.rasterization.projection import PredictedIntersections
from sugar_utils.errors import TrainingError

MAX_SCALE_IN_EXTENTS = 1e4
PARAMETER_INTERVAL = 8
"""Iterations between two checks of all parameters; gradients and scales are checked in each."""

TOTAL = "loss"  # name under which stages report the weighted sum of their terms
_ROW_LIMIT = 3
_KEPT = "the last good checkpoint is kept"
_LOOK = "look at this image and its pose, or continue from it with lower learning rates"


def check_step(
    *,
    losses: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    log_scales: Tensor,
    extent: float,
    radii: Tensor,
    iteration: int,
    camera_name: str,
    parameters: Mapping[str, Tensor] | None = None,
    look_at_parameters: bool = True,
    guess: PredictedIntersections | None = None,
) -> bool:
    """All checks of one iteration with one synchronisation; whether the view shows any Gaussian.

    Call it after the backward passes and before the optimiser's step, so that bad numbers never
    reach the parameters. The first check that fails raises: parameters, losses, gradients, scales;
    before them, with ``PairsMissed``, a guess that was too low.

    Args:
        radii: Radii in pixels, 0 where invisible. (N,)
        look_at_parameters: Or only where something else is bad.
        guess: What was taken for the view's number of tile intersections.
    """
    parameters = parameters or {}
    looked_at = parameters.values() if look_at_parameters else ()
    both = dict(enumerate([*looked_at, *gradients.values()]))
    probes = [*_norm_probes(both), *(value.detach().reshape(()) for value in losses.values())]
    # The smallest and the largest entry; both propagate NaN.
    probes += log_scales.detach().aminmax() if log_scales.numel() else ()
    largest = [radii.detach().amax()] if radii.numel() else []
    numbers = _read([*probes, *largest, *([] if guess is None else [guess.excess])])
    if guess is not None:
        guess.commit(numbers.pop())
    shows = bool(largest) and numbers.pop() > 0
    highest = numbers[-1] if log_scales.numel() else 0.0
    if not all(map(math.isfinite, numbers)) or highest > _log_limit(extent):
        check_parameters(parameters, iteration, camera_name)
        check_losses(losses, iteration, camera_name)
        check_gradients(gradients, iteration, camera_name)
        check_scales(log_scales, extent, iteration, camera_name)
    return shows


def check_parameters(named: Mapping[str, Tensor], iteration: int, camera_name: str) -> None:
    """Stop on a parameter that is not finite; renderers leave such Gaussians out in silence.

    Parameters are given by name, (N, ...) each and on one device.
    """
    if not all(map(math.isfinite, _read(_norm_probes(named)))):
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
        rows = () if tensor is None else _rows_of(~tensor.detach().isfinite())
        if len(rows) > 0:
            raise TrainingError(
                f"{kind} {name} is not finite in {_describe(rows, tensor)} "
                f"{_where(iteration, camera_name)}; {_KEPT}: {advice}"
            )


def _read(probes: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers: the one synchronisation."""
    return torch.stack([probe.float() for probe in probes]).tolist() if probes else []


def _norm_probes(named: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Norms, each finite only if every entry is."""
    tensors = [t.detach() for t in named.values() if t is not None and t.numel() > 0]
    return list(torch._foreach_norm(tensors, 2.0)) if tensors else []


def _log_limit(extent: float) -> float:
    return math.log(MAX_SCALE_IN_EXTENTS * extent) if extent > 0 else math.inf


def _rows_of(bad: Tensor) -> Tensor:
    return (bad if bad.dim() else bad[None]).nonzero()[:, 0].unique()


def _describe(rows: Tensor, tensor: Tensor) -> str:
    first = ", ".join(str(row) for row in rows[:_ROW_LIMIT].tolist())
    return f"{len(rows)} of {len(tensor) if tensor.dim() else 1} rows (first: {first})"


def _where(iteration: int, camera_name: str) -> str:
    return f"at iteration {iteration}, camera {camera_name}"
