# SPDX-License-Identifier: Apache-2.0
"""Programs that are verbs of ``sugar`` alone, for tests: ``run_cli(export.main, ...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sugar_pipeline.command_line import main_of


class Verb(NamedTuple):
    """A program with the main function that a script would have. It has no state."""

    main: Callable[[], None]


export = Verb(main_of("export", None))
render = Verb(main_of("render", None))
scan = Verb(main_of("scan", None))
targets = Verb(main_of("targets", None))
view = Verb(main_of("view", None))
