# SPDX-License-Identifier: Apache-2.0
"""A call of ``convert.py`` under way: what was asked, what was done before, and how far it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gaussian_splatting.posing.convert_options import ConvertOptions
from gaussian_splatting.posing.scene_folder import Source, read_record
from sugar_utils.console import Console
from sugar_utils.memory import memory_usage, reset_peak


@dataclass
class Work:
    """A call under way.

    Attributes:
        source: Where the photographs are.
        options: What was asked for.
        console: Where to report.
        steps: Name, seconds and peak bytes of each step so far.
    """

    source: Source
    options: ConvertOptions
    console: Console
    steps: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def models(self) -> Path:
        """Folder of the models that were chosen, the largest as ``0``."""
        return self.source.work / "sparse"

    @property
    def flat(self) -> Path:
        """Folder of what will take its place in the scene."""
        return self.source.work / "flat"

    def noted(self, name: str, key: str) -> bool:
        """Whether an earlier call noted a step with these settings and inputs."""
        return read_record(self.source.root).get(name) == key

    @contextlib.contextmanager
    def step(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how far a step has come, with the time that is left; and note what it took."""
        began = time.monotonic()
        reset_peak("cpu")
        with self.console.progress(title, 1, total) as progress:
            # Of a step that goes on, what was done before says nothing about its speed.
            yield lambda done: progress.update(min(done, total)) if done else None
        self.steps.append((title, time.monotonic() - began, memory_usage("cpu").peak))
