# SPDX-License-Identifier: Apache-2.0
"""A training stage with the live view, which the pipeline loads here alone and can do without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.observer import ObserverFactory
from gaussian_splatting.engine.runner import StageOptions, run_stage
from sugar_utils.console import Console
from sugar_utils.libraries import package_or_none


def run_watched_stage(
    options: StageOptions, *, images: ImageStore | None = None, console: Console | None = None
) -> Path:
    """Call :func:`run_stage` with the live view, which the flags of the run can turn off."""
    return run_stage(options, images, console=console, observers=_observers())


def _observers() -> Sequence[ObserverFactory]:
    viewer = package_or_none("sugar_viewer.live_view")
    return () if viewer is None else (viewer.open_live_view,)
