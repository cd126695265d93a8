# SPDX-License-Identifier: Apache-2.0
"""The recordings of a stage, and whether another one pays.

A recording costs as much as ten passes, so one is made of what came before and will come again. A
stage whose passes are of too many kinds for that is better off without.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from gaussian_splatting.engine.recording.recorded_pass import RecordedPass
from gaussian_splatting.rasterization.projection import rounded_up

MAX_RECORDINGS = 8
MAX_MISSES = 0.05  # of the passes that are asked for, those that had to be recorded
WINDOW = 500  # passes that misses are counted in


class PassKey(NamedTuple):
    """The facts that a recording depends on, besides where the parameters lie."""

    kind: Hashable  # see ``Stage.variant``, and facts of the view
    resources: Hashable
    step: Hashable | None  # see ``recorded_step.step_facts``; None where the host makes the step


class _Entry(NamedTuple):
    recorded: RecordedPass
    capacity: int  # of the tile lists


class Recordings:
    """Keeps the recordings that were used last; those of other parameters are dropped.

    Tile lists of a recording are long enough for all views of its kind that were seen so far. With
    a length for each view a capture of many views would be recorded all the time.
    """

    def __init__(self) -> None:
        self._limit = MAX_RECORDINGS
        self._parameters: Hashable = None
        self._entries: OrderedDict[PassKey, _Entry] = OrderedDict()
        self._capacities: dict[Hashable, int] = {}  # by kind
        self._asked_for: set[PassKey] = set()
        self._were_misses: deque[bool] = deque(maxlen=WINDOW)

    def follow(self, parameters: Hashable) -> None:
        """Drop the recordings of parameters that are gone."""
        if parameters != self._parameters:
            self.clear()
            self._parameters = parameters

    def capacity(self, kind: Hashable, needed: int, survey: Callable[[], int]) -> int:
        """Length of tile lists for a kind, of which one more view needs some.

        Args:
            survey: Returns the most that any view of the kind needed; called for a new kind.
        """
        if kind not in self._capacities:
            self._capacities[kind] = rounded_up(survey())
        if needed > self._capacities[kind]:
            self._capacities[kind] = rounded_up(needed)
        return self._capacities[kind]

    def find(self, key: PassKey) -> RecordedPass | None:
        """Return a recording that is long enough for its kind."""
        entry = self._entries.get(key)
        if entry is None or entry.capacity < self._capacities[key.kind]:
            return None
        self._were_misses.append(False)
        self._entries.move_to_end(key)
        return entry.recorded

    def is_due(self, key: PassKey) -> bool:
        """Whether a pass that has no recording came before, so that it will come again."""
        came_before = key in self._asked_for
        self._asked_for.add(key)
        return came_before

    def make_room(self, key: PassKey) -> None:
        """Drop what a recording of this key replaces, so that it may use the memory."""
        self._were_misses.append(True)
        self._entries.pop(key, None)
        while len(self._entries) >= self._limit:
            self._entries.popitem(last=False)

    def put(self, key: PassKey, recorded: RecordedPass) -> None:
        """Keep a new recording."""
        self._entries[key] = _Entry(recorded, self._capacities[key.kind])

    @property
    def misses(self) -> int | None:
        """How many of the last passes had to be recorded, if that were too many; else None."""
        n_misses = sum(self._were_misses)
        are_many = n_misses > MAX_MISSES * WINDOW
        return n_misses if are_many and len(self._were_misses) == WINDOW else None

    def lower_limit(self) -> bool:
        """Drop all, and keep fewer from now on than there were; whether any may be kept."""
        self._limit = max(0, min(self._limit, len(self._entries)) - 1)
        self._entries.clear()
        return self._limit > 0

    def clear(self) -> None:
        """Drop all recordings."""
        self._entries.clear()
        self._capacities.clear()
        self._asked_for.clear()

    def __len__(self) -> int:
        return len(self._entries)
