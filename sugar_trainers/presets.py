# SPDX-License-Identifier: Apache-2.0
"""Presets of the original: flags that set several others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sugar_utils.errors import UserError
from sugar_utils.flags import FlagValues, optional_str
from sugar_utils.settings import flag

REFINEMENT_TIMES = {"short": 2_000, "medium": 7_000, "long": 15_000}
# triangles, Gaussians per triangle
LOW_POLY = (200_000, 6)
HIGH_POLY = (1_000_000, 1)
_preset = partial(flag, group="presets")


@dataclass(frozen=True)
class PresetFlags:
    """Flags that set several others: of the pipelines, and of ``metrics.py``."""

    low_poly: bool = _preset(
        False,
        "200,000 triangles with 6 Gaussians each, in place of -v and -g",
        no_effect_when="with --high_poly",
        task="result",
    )
    high_poly: bool = _preset(
        False,
        "1,000,000 triangles with 1 Gaussian each, in place of -v, -g and --low_poly",
        task="result",
    )
    refinement_time: str | None = _preset(
        None,
        "2000, 7000 or 15000 iterations of refinement, in place of -f",
        parse=optional_str,
        metavar="{short,medium,long}",
        task="result",
    )


def apply_presets(flags: FlagValues) -> FlagValues:
    """Return the flags with ``--low_poly``, ``--high_poly`` and ``--refinement_time`` resolved.

    As in the original, they win over ``-v``, ``-g`` and ``-f``, and high over low. Without
    ``--preset``, pipelines are fast.
    """
    flags = flags.replaced(preset=flags.get("preset") or "fast")
    if flags["low_poly"] or flags["high_poly"]:
        n_triangles, n_gaussians = HIGH_POLY if flags["high_poly"] else LOW_POLY
        flags = flags.replaced(n_vertices_in_mesh=n_triangles, gaussians_per_triangle=n_gaussians)
    time = flags["refinement_time"]
    if time is None:
        return flags
    if time not in REFINEMENT_TIMES:
        raise UserError(
            f"--refinement_time {time} is unknown; choose one of {', '.join(REFINEMENT_TIMES)}"
        )
    return flags.replaced(refinement_iterations=REFINEMENT_TIMES[time])
