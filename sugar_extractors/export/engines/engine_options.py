# SPDX-License-Identifier: Apache-2.0
"""Flags of ``sugar export`` for game engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag

COLLISIONS = ("auto", "convex", "mesh")
MOST_LEVELS = 8
_FEWEST_TRIANGLES = 12  # those of a box

_flag = partial(flag, group="export")


@dataclass(frozen=True)
class EngineOptions:
    """Flags for game engines."""

    collision: str | None = _flag(
        None,
        "add shapes to collide with, which viewers do not show: convex pieces, which need the "
        "package coacd, or one closed mesh; auto, also without a value: pieces where the package "
        "is installed",
        parse=str,
        choices=COLLISIONS,
        nargs="?",
        const="auto",
        no_effect_when="it is an error unless --to glb, usdz, glb_both or usdz_both",
    )
    collision_pieces: int = _flag(
        32, "convex pieces at most", parse=positive_int, no_effect_when="without --collision"
    )
    collision_triangles: int = _flag(
        4000,
        "triangles of the mesh to collide with, or of the one that is cut into pieces",
        parse=positive_int,
        no_effect_when="without --collision",
    )
    lods: int | None = _flag(
        None,
        "number of levels of detail, each with a quarter of the triangles of the one before: "
        "NAME_LOD0.glb and so on, and all of them in NAME.glb by MSFT_lod",
        parse=positive_int,
        no_effect_when="it is an error unless --to glb",
    )

    def __post_init__(self) -> None:
        if self.lods is not None and not 2 <= self.lods <= MOST_LEVELS:
            raise UserError(f"--lods {self.lods}: choose 2 to {MOST_LEVELS} levels")
        if self.collision_triangles < _FEWEST_TRIANGLES:
            raise UserError(
                f"--collision_triangles {self.collision_triangles}: choose {_FEWEST_TRIANGLES} or "
                "more, 4000 is usual"
            )
