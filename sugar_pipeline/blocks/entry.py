# SPDX-License-Identifier: Apache-2.0
"""Functions of blocks that the commands call; runs of whole captures do not import the others."""

from __future__ import annotations

from sugar_pipeline.blocks.automatic import is_divided, with_number
from sugar_pipeline.blocks.block_flags import check_block_flags
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_utils.console import Console

__all__ = ["check_block_flags", "is_divided", "run", "with_number"]


def run(plan: PipelinePlan, console: Console) -> PipelineResult:
    """Run a capture in the blocks of its plan."""
    # Here and not above: most runs are whole.
    from sugar_pipeline.blocks.blocks_run import run_in_blocks

    return run_in_blocks(plan, console)
