# SPDX-License-Identifier: Apache-2.0
"""Observers of a training: their protocol, and the flags of the live view.

The engine calls observers and knows none of them; ``sugar_viewer`` has one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.console import Console
from sugar_utils.flags import integer
from sugar_utils.process_group import ProcessGroup
from sugar_utils.settings import flag

DEFAULT_PORT = 8080
LOCALHOST = "localhost"
_HIGHEST_PORT = 65_535


def port_number(text: str) -> int:
    """Parse the number of a port."""
    value = integer(text)
    if not 1 <= value <= _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose 1024 to {_HIGHEST_PORT}")
    return value


@dataclass(frozen=True)
class ViewerOptions:
    """Whether a training can be watched in a browser; nothing of it changes the result."""

    viewer: int | None = flag(
        None,
        "show the model while it trains on a page in the browser, at this port of the "
        f"machine ({DEFAULT_PORT} where none is named)",
        group="run",
        parse=port_number,
        nargs="?",
        const=DEFAULT_PORT,
        metavar="PORT",
        task="run",
    )
    viewer_host: str = flag(
        LOCALHOST,
        "address that the page is served on; 0.0.0.0 lets other machines look, and pause the run",
        group="run",
        no_effect_when="without --viewer",
    )


@dataclass(frozen=True)
class ObservedRun:
    """Facts of a run that an observer is given before the first iteration."""

    stage: Stage
    scene: Scene
    last_iteration: int
    viewer: ViewerOptions
    group: ProcessGroup
    console: Console


class Observer(AbstractContextManager, Protocol):
    """Looks at the model between iterations, in the thread that trains; changes nothing."""

    def after_step(
        self,
        stage: Stage,
        iteration: int,
        terms: Mapping[str, Tensor],
        stopped: Callable[[], object],
    ) -> None:
        """See the model after an iteration.

        Args:
            terms: Detached scalars of the iteration by the name of the loss term.
            stopped: Whether the run was asked to stop; an observer that waits has to look.
        """


ObserverFactory = Callable[[ObservedRun], Observer]
"""Opens an observer of a run; it is closed, as a context, when the run ends."""
