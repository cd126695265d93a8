# SPDX-License-Identifier: Apache-2.0
"""What carries out the pass of a stage over a view; the stepper calls it and knows one way only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.training_views import TrainingView
from sugar_utils.errors import Notify


class StepRunner(Protocol):
    """Carries out passes of one stage; bits do not depend on which one does."""

    def run(self, stage: Stage, view: TrainingView, resources: StepResources) -> ViewResult:
        """Do what :meth:`Stage.accumulate` does."""
        ...

    def restart(self) -> None:
        """Begin anew after a step with bad numbers, from which on nothing was changed."""
        ...

    def release(self, *, ran_out: bool) -> bool:
        """Free memory that only saves time; whether there was any.

        Args:
            ran_out: Whether memory ran out, so that less is to be taken from now on.
        """
        ...


class PlainRunner:
    """Lets the stage do it, operation by operation."""

    def run(self, stage: Stage, view: TrainingView, resources: StepResources) -> ViewResult:
        """Call :meth:`Stage.accumulate`."""
        return stage.accumulate(view, resources)

    def restart(self) -> None:
        """Do nothing: the host makes the steps."""

    def release(self, *, ran_out: bool) -> bool:
        """Return False: it holds none."""
        return False


NewStepRunner = Callable[[Notify], StepRunner]
"""Makes the runner of a run, which warns by a function."""


def plain_runner(warn: Notify) -> StepRunner:
    """Make a plain runner, which has nothing to warn of."""
    return PlainRunner()
