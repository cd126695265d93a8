# SPDX-License-Identifier: Apache-2.0
"""Checks that stop training within the iteration in which its numbers went bad.

Every check costs one synchronisation with the device when all is well; ``check_step`` does all
those of an iteration with a single one. What exactly is wrong is looked up only after a check
failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gaussian_splatting.rasterization.intersection_prediction import PredictedIntersections
from sugar_utils.errors import TrainingError

MAX_SCALE_IN_EXTENTS = 1e4
TOTAL = "loss"  # name under which stages report the weighted sum of their terms
_ROW_LIMIT = 3
_KEPT = "the last good checkpoint is kept"
_LOOK = "look at this image and its pose, or continue from it with lower learning rates"


def check_losses(terms: Mapping[str, Tensor], iteration: int, camera_name: str) -> None:
    """Stop on a loss term that is not a finite number; names the first one and its value."""
    if _all_finite(_loss_probes(terms)):
        return
    # The sum comes last: it is bad whenever a term is, and names nothing.
    for name in sorted(terms, key=lambda name: name == TOTAL):
        number = float(terms[name].detach())
        if not math.isfinite(number):
            where = _where(iteration, camera_name)
            raise TrainingError(f"loss term {name} is {number} {where}; {_KEPT}: {_LOOK}")


def check_gradients(named: Mapping[str, Tensor | None], iteration: int, camera_name: str) -> None:
    """Stop on a gradient that is not finite.

    Args:
        named: Gradients by parameter name, (N, ...) each and on one device; None means absent.
    """
    _check_rows("gradient of", named, _LOOK, iteration, camera_name)


def check_parameters(named: Mapping[str, Tensor], iteration: int, camera_name: str) -> None:
    """Stop on a parameter that is not finite; renderers leave such Gaussians out in silence.

    Args:
        named: Parameters by name, (N, ...) each and on one device.
    """
    advice = "continue from it with lower learning rates"
    _check_rows("parameter", named, advice, iteration, camera_name)


def _check_rows(
    kind: str, named: Mapping[str, Tensor | None], advice: str, iteration: int, camera_name: str
) -> None:
    """Name the first bad tensor and how many rows (Gaussians) of it are bad."""
    if _all_finite(_norm_probes(named)):
        return
    for name, tensor in named.items():
        rows = () if tensor is None else _bad_rows(tensor)
        if len(rows) > 0:
            n = tensor.shape[0] if tensor.dim() > 0 else 1
            raise TrainingError(
                f"{kind} {name} is not finite in {len(rows)} of {n} rows (first: "
                f"{_list_rows(rows)}) {_where(iteration, camera_name)}; {_KEPT}: {advice}"
            )


def check_scales(log_scales: Tensor, extent: float, iteration: int, camera_name: str) -> None:
    """Stop on Gaussians that are not finite or exceed ``MAX_SCALE_IN_EXTENTS`` times the scene.

    Args:
        log_scales: Logarithms of the standard deviations. (N, 3)
        extent: Size of the capture in world units; not positive means unknown.
    """
    extremes = _read(_scale_probes(log_scales))
    if all(map(math.isfinite, extremes)) and max(extremes, default=0.0) <= _log_limit(extent):
        return
    values = log_scales.detach()
    bad = (~(values <= _log_limit(extent)) | ~values.isfinite()).reshape(len(values), -1).any(dim=1)
    rows = bad.nonzero().flatten()
    worst = float(values[rows].float().max())
    limit = f"{MAX_SCALE_IN_EXTENTS:g} times the scene extent {extent:g}"
    raise TrainingError(
        f"scales out of bounds: log_scales reaches {worst:g}, bad in {len(rows)} of "
        f"{len(values)} rows (first: {_list_rows(rows)}), the limit is {limit}, "
        f"{_where(iteration, camera_name)}; "
        f"{_KEPT}: continue from it with a lower scale learning rate, or check the scene's poses"
    )


def shows_any(radii: Tensor) -> bool:
    """Whether a view shows any Gaussian; one synchronisation.

    Args:
        radii: Radii in pixels, 0 where invisible. (N,)
    """
    return radii.numel() > 0 and _read([radii.detach().amax()])[0] > 0


def check_population(n_gaussians: int, iteration: int, event: str = "pruning") -> None:
    """Stop when no Gaussians are left."""
    if n_gaussians < 1:
        raise TrainingError(
            f"no Gaussians left after {event} at iteration {iteration}; {_KEPT}: "
            "start from a model with more opaque Gaussians (more vanilla iterations, or another "
            "--iteration_to_load)"
        )


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
    guess: PredictedIntersections | None = None,
) -> bool:
    """All checks of one iteration with a single synchronisation; arguments as in each of them.

    ``guess`` is what was taken for the view's number of pairs. Call it after the backward passes
    and before the optimiser's step, so that bad numbers never reach the parameters.

    Raises:
        PairsMissed: The guess was too low, so that the rest was not looked at.
        TrainingError: The first check that fails: parameters, losses, gradients, scales.
    """
    parameters = parameters or {}
    both = dict(enumerate([*parameters.values(), *gradients.values()]))
    largest = [radii.detach().amax()] if radii.numel() else []
    probes = [*_norm_probes(both), *_loss_probes(losses), *_scale_probes(log_scales), *largest]
    if guess is not None:
        probes.append(guess.excess)
    numbers = _read(probes)
    if guess is not None:
        guess.commit(numbers.pop())
    shows = bool(largest) and numbers.pop() > 0
    highest = numbers[-1] if log_scales.numel() else 0.0
    if all(map(math.isfinite, numbers)) and highest <= _log_limit(extent) and shows:
        return True
    check_parameters(parameters, iteration, camera_name)
    check_losses(losses, iteration, camera_name)
    check_gradients(gradients, iteration, camera_name)
    check_scales(log_scales, extent, iteration, camera_name)
    return shows_any(radii)


def _all_finite(probes: list[Tensor]) -> bool:
    return all(map(math.isfinite, _read(probes)))


def _read(probes: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers: the one synchronisation."""
    return torch.stack([probe.float() for probe in probes]).tolist() if probes else []


def _loss_probes(terms: Mapping[str, Tensor]) -> list[Tensor]:
    return [value.detach().reshape(()) for value in terms.values()]


def _norm_probes(named: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Norms, each finite only if every entry is."""
    tensors = [t.detach() for t in named.values() if t is not None and t.numel() > 0]
    return list(torch._foreach_norm(tensors, 2.0)) if tensors else []


def _log_limit(extent: float) -> float:
    return math.log(MAX_SCALE_IN_EXTENTS * extent) if extent > 0 else math.inf


def _scale_probes(log_scales: Tensor) -> list[Tensor]:
    """The smallest and the largest entry; both propagate NaN."""
    return list(log_scales.detach().aminmax()) if log_scales.numel() else []


def _bad_rows(tensor: Tensor) -> Tensor:
    """Indices of rows that hold something not finite."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    bad = ~tensor.detach().isfinite()
    return bad.reshape(len(tensor) if tensor.dim() else 1, -1).any(dim=1).nonzero().flatten()


def _list_rows(rows: Tensor) -> str:
    return ", ".join(str(row) for row in rows[:_ROW_LIMIT].tolist())


def _where(iteration: int, camera_name: str) -> str:
    return f"at iteration {iteration}, camera {camera_name}"
