# SPDX-License-Identifier: Apache-2.0
"""At which size photographs are trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sugar_utils.errors import UserError

DIVISORS = (1, 2, 4, 8)
_MAX_SIDE = 1 << 16


class SizeRule(Protocol):
    """Chooses the size at which an image is trained on."""

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""
        ...


def whole_pixels(width: float, height: float) -> tuple[int, int]:
    """Whole pixels, at least one a side.

    Raises:
        UserError: There are so many of them that a division must have been meant.
    """
    if max(width, height) > _MAX_SIDE:
        raise UserError(
            f"images of {width:.6g} x {height:.6g} px cannot be worked at, a side has at most "
            f"{_MAX_SIDE:,} px; use another --resolution or --resolution_factor"
        )
    return max(1, round(width)), max(1, round(height))


@dataclass(frozen=True)
class VanillaSize:
    """The size rule of the plain 3DGS trainer."""

    resolution: float = -1
    """-1: at most 1600 px wide; 1, 2, 4, 8: divisor; another positive number: width in pixels."""

    def __post_init__(self) -> None:
        if self.resolution != -1 and not (math.isfinite(self.resolution) and self.resolution > 0):
            raise UserError(
                f"--resolution must be -1, a divisor (1, 2, 4, 8) or a width, not {self.resolution}"
            )

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""
        if self.resolution in DIVISORS:
            return whole_pixels(width / self.resolution, height / self.resolution)
        wanted = min(width, 1600) if self.resolution == -1 else min(self.resolution, 2 * _MAX_SIDE)
        wanted = max(1, int(wanted))
        return whole_pixels(wanted, height * wanted // width)
