# SPDX-License-Identifier: Apache-2.0
"""Number and size of the processes that torchrun started, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sugar_utils.errors import UserError, explained

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """Rank and number of the processes of torchrun; rank 0 prints for all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read the environment; one process where torchrun was not used.

        Raises:
            UserError: Its variables hold no numbers.
        """
        if any(name not in environment for name in _VARIABLES):
            return cls()
        what = "the variables RANK, WORLD_SIZE, LOCAL_RANK do not hold numbers"
        with explained(what, "start with torchrun, or unset them", ValueError):
            rank = int(environment["RANK"])
            size = int(environment["WORLD_SIZE"])
            local_rank = int(environment["LOCAL_RANK"])
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, local_rank, local_size)


def is_follower() -> bool:
    """Whether another process of the run is the one that prints."""
    try:
        return Launch.read().rank > 0
    except UserError:
        return False
