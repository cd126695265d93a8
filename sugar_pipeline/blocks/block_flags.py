# SPDX-License-Identifier: Apache-2.0
"""Checks of ``--blocks`` and ``--cluster`` before a run starts."""

from __future__ import annotations

from pathlib import Path

from gaussian_splatting.scenes.scene import Scene
from sugar_pipeline.blocks.automatic import (
    OBJECT_MASKS,
    asks_for_object_masks,
    count_photographs,
    flags_of_whole,
    reason_for_one_block,
)
from sugar_pipeline.pipeline.pipeline_flags import runs_stage
from sugar_utils.errors import UserError
from sugar_utils.flags import AUTO, FlagValues
from sugar_utils.torchrun import Launch

MIN_VIEWS = 3  # of a block


def require_views(n: int, n_views: int, root: Path) -> None:
    """Refuse more blocks than photographs suffice for.

    Raises:
        UserError: There are too many.
    """
    if n * MIN_VIEWS > n_views:
        raise UserError(
            f"--blocks {n}: {root} has {n_views} photographs to train on, and a block needs "
            f"{MIN_VIEWS}; use at most {max(1, n_views // MIN_VIEWS)} blocks"
        )


def check_capture(n: int, scene: Scene) -> None:
    """Refuse a capture with masks or maps that blocks cannot use, before it is cut.

    Raises:
        UserError: There is such a thing, or there are too few photographs.
    """
    reason = reason_for_one_block(scene)
    if reason is not None:
        raise UserError(f"--blocks {n}: {reason}")
    require_views(n, len(scene.train_cameras), scene.root)


def check_block_flags(flags: FlagValues) -> None:
    """Refuse flags that cannot act with blocks, before anything is done.

    Raises:
        UserError: One was given.
    """
    if flags["cluster"] is not None:
        if flags["blocks"] == 1:
            raise UserError("--cluster spreads blocks; give their number with --blocks")
        # Here and not above: runs without a cluster do without it.
        from sugar_pipeline.blocks.cluster import check_cluster

        check_cluster(flags["cluster"])
    if flags["blocks"] in (AUTO, 1):
        return
    names = flags_of_whole(flags)
    if names:
        raise UserError(f"{', '.join(names)}: not with --blocks; leave one of them out")
    if not runs_stage(flags, "mesh"):
        raise UserError(
            f"--stop_after {flags['stop_after']}: not with --blocks, which end in a mesh"
        )
    if asks_for_object_masks(flags):
        raise UserError(f"--blocks: {OBJECT_MASKS}")
    n_photographs = count_photographs(flags)
    if n_photographs is not None:
        # Of these some are held out: a second check follows.
        require_views(flags["blocks"], n_photographs, flags["scene_path"])
    if Launch.read().size > 1:
        raise UserError("--blocks needs one process; --cluster spreads them over GPUs and machines")
