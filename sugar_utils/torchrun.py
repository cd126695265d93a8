# SPDX-License-Identifier: Apache-2.0
"""What torchrun tells a process, read without torch: the first process speaks for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sugar_utils.errors import UserError, explained

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """From the environment; one process where torchrun was not used."""
        if any(name not in environment for name in _VARIABLES):
            return cls()
        what = "the variables RANK, WORLD_SIZE, LOCAL_RANK do not hold numbers"
        with explained(what, "start with torchrun, or unset them", ValueError):
            rank, size, local = (int(environment[name]) for name in _VARIABLES[:3])
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, local, local_size)


def is_follower() -> bool:
    """Whether another process of the run is the one that speaks."""
    try:
        return Launch.read().rank > 0
    except UserError:
        return False
