# SPDX-License-Identifier: Apache-2.0
"""Tables of what fits into memory, in the README and the memory guide, are those of the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from sugar_pipeline.blocks.automatic import PIXELS_PER_GAUSSIAN, training_bytes
from tests.support.repository import ROOT

WIDTH = 1600
HEIGHT = 1200
PLANNED_SHARE = 0.8  # of free memory
FREE_SHARE = 0.9  # of a GPU
USED_MAIN_MEMORY = 3 * 2**30  # bytes
SLACK = 0.96  # numbers are rounded down to two or three digits
GUIDE = ROOT / "DOCS" / "VRAM_GUIDE.md"
README = ROOT / "README.md"
FORMATS = (
    OptimizerConfig(),
    OptimizerConfig("bf16"),
    OptimizerConfig("bf16", use_bfloat16=True),
    OptimizerConfig(bands_on_host=True),
)
"""Formats of the optimiser in the columns of the guide."""


def rows_of(path) -> Iterator[tuple[float, list[str]]]:
    """(usable bytes, cells behind the memory) of each row of a table of memory."""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| (GPU of |no GPU,.*? )?(\d+) GB \| (.*) \|$", line)
        if found:
            memory = int(found[2]) * 2**30
            is_cpu = (found[1] or "").startswith("no GPU")
            free = memory - USED_MAIN_MEMORY if is_cpu else FREE_SHARE * memory
            yield PLANNED_SHARE * free, [cell.strip() for cell in found[3].split("|")]


def check_count(cell: str, budget: float, optimizer: OptimizerConfig) -> int:
    """Check that so many Gaussians fit, and not many more; return their number."""
    n = round(float(cell.split(" million")[0]) * 1e6)
    assert SLACK * budget <= training_bytes(n, WIDTH, HEIGHT, optimizer) <= budget
    return n


def check_photographs(cell: str, n_gaussians: int) -> None:
    expected = n_gaussians * PIXELS_PER_GAUSSIAN / (WIDTH * HEIGHT)
    assert int(cell) == pytest.approx(expected, rel=0.03)


def test_the_guide_has_the_numbers_of_the_plan():
    rows = list(rows_of(GUIDE))
    assert len(rows) == 8
    for budget, (photographs, *counts) in rows:
        numbers = [
            check_count(cell, budget, optimizer)
            for cell, optimizer in zip(counts, FORMATS, strict=True)
            if "million" in cell
        ]
        check_photographs(photographs, numbers[0])


def test_the_readme_has_those_of_the_guide():
    rows = list(rows_of(README))
    assert len(rows) == 6
    for budget, (photographs, whole, half) in rows:
        check_photographs(photographs, check_count(whole, budget, FORMATS[0]))
        check_count(half, budget, FORMATS[2])
