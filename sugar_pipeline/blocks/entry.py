# SPDX-License-Identifier: Apache-2.0
"""Functions of blocks that the commands call; runs of whole captures do not import them."""

from __future__ import annotations

import argparse

from sugar_pipeline.blocks.automatic import automatic_blocks
from sugar_pipeline.blocks.block_flags import check_block_flags
from sugar_pipeline.pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_utils.console import Console
from sugar_utils.flags import AUTO
from sugar_utils.settings import given_flags, with_flags


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot act with blocks, before anything is done.

    Raises:
        UserError: One was given.
    """
    check_block_flags(args, given_flags(args, full_parser(None)))


def run(args: argparse.Namespace, console: Console) -> PipelineResult | None:
    """Run a capture in as many blocks as it needs; None where it is whole.

    Args:
        args: Flags of the run, with its mode.
    """
    changed_flags = given_flags(args, full_parser(None))
    n_blocks = args.blocks
    if n_blocks == AUTO:
        n_blocks = automatic_blocks(args, changed_flags, console)
    if n_blocks == 1:
        return None
    # Here and not above: most runs are whole.
    from sugar_pipeline.blocks.blocks_run import run_in_blocks

    return run_in_blocks(with_flags(args, blocks=n_blocks), changed_flags, console)
