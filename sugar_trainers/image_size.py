# SPDX-License-Identifier: Apache-2.0
"""The size at which SuGaR's stages train on a photograph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from gaussian_splatting.data.image_sizes import DIVISORS, whole_pixels
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag

_flag = partial(flag, group="image size")


@dataclass(frozen=True)
class SugarSize:
    """The size rule of SuGaR's stages: a divisor, and a cap on the long side.

    As in the original, the cap is compared with the size of the file and multiplies the divisor:
    a 5187 px image with divisor 2 and cap 1920 is trained on at 960 px.
    """

    img_resolution: int = _flag(
        1, "divide the size by this. As upstream, the limit below is compared with the size of "
        "the file and multiplies the divisor", choices=DIVISORS, idle="with --resolution_factor",
    )  # fmt: skip
    img_size_limit: int = _flag(
        1920, "shrink images whose long side is larger to this many pixels", parse=positive_int,
        idle="with --resolution_factor",
    )  # fmt: skip
    resolution_factor: float | None = _flag(
        None, "divide the size of the original images by this number, and lift the limit above",
        parse=positive_float,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.img_resolution not in DIVISORS:
            raise UserError(
                f"--img_resolution must be 1, 2, 4 or 8, not {self.img_resolution}; "
                "use --resolution_factor for other divisors"
            )
        if self.img_size_limit < 1:
            raise UserError(f"--img_size_limit must be at least 1, not {self.img_size_limit}")
        factor = self.resolution_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise UserError(f"--resolution_factor must be a positive number, not {factor}")

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""
        if self.resolution_factor is not None:
            divisor = self.resolution_factor
        else:
            divisor = float(self.img_resolution)
            if max(width, height) > self.img_size_limit:
                divisor *= max(width, height) / self.img_size_limit
        return whole_pixels(width / divisor, height / divisor)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for flags that were given and cannot act."""
        default = SugarSize(resolution_factor=self.resolution_factor)
        if self.resolution_factor is None or self == default:
            return ()
        return ("--img_resolution and --img_size_limit have no effect beside --resolution_factor",)
