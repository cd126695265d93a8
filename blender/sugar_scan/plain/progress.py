# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, from the lines that it prints."""

import re
from dataclasses import dataclass
from pathlib import Path

_STAGE = re.compile(r"stage (\d+) of (\d+): (.*)")
_STEP = re.compile(r"(.+) (\d+)/(\d+)(?: .*?)?(?:eta (\S+))?$")
_RESULTS = re.compile(r"results in (.+): ")
_ERROR = "error: "


@dataclass
class Progress:
    """State of a run; every line that it prints is given to :meth:`read`."""

    stage: int = 0  # counts from 1; 0 before the first
    n_stages: int = 1
    title: str = "starting"
    share: float = 0.0  # of the stage that is done
    remaining: str = ""  # of the current loop, as m:ss
    error: str = ""  # the last line that names one
    results: Path | None = None  # folder of results, when it is there

    def read(self, line: str) -> None:
        """Take a line into account."""
        line = line.strip()
        stage = _STAGE.match(line)
        step = _STEP.match(line)
        results = _RESULTS.match(line)
        if line.startswith(_ERROR):
            self.error = line.removeprefix(_ERROR)
        elif stage is not None:
            self.stage = int(stage[1])
            self.n_stages = int(stage[2])
            self.title = stage[3]
            self.share = 0.0
            self.remaining = ""
        elif results is not None:
            self.results = Path(results[1])
        elif step is not None and int(step[3]) > 0:
            self.share = min(1.0, int(step[2]) / int(step[3]))
            self.remaining = step[4] or ""

    @property
    def fraction(self) -> float:
        """Share of all stages that is done, as if all took equally long; between 0 and 1."""
        done = max(0, self.stage - 1) + (self.share if self.stage else 0.0)
        return min(1.0, done / self.n_stages)

    @property
    def text(self) -> str:
        """One line for people."""
        words = [f"{self.title}, {self.share:.0%}" if self.share else self.title]
        if self.stage:
            words.insert(0, f"{self.stage} of {self.n_stages}:")
        if self.remaining:
            words.append(f"({self.remaining} left)")
        return " ".join(words)
