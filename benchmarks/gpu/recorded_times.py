# SPDX-License-Identifier: Apache-2.0
"""How long a step takes with recorded passes and without, and which kernels take it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.common import Check, Finding, Setup, milliseconds, synchronize
from benchmarks.gpu.recorded import (
    FULL_SIZES,
    N_VIEWS,
    QUICK_SIZES,
    STAGES,
    Run,
    Size,
    new_recorder,
    warnings_of,
)
from sugar_utils import warp_launch
from sugar_utils.memory import release_cached

PROFILED_STEPS = 20
ROWS = 40  # of the table of a profile
VANILLA = STAGES[0]


def _warmed_up(setup: Setup, run: Run) -> Run:
    for _ in range(setup.size(3 * N_VIEWS, 3)):
        run.step()
    return run


def times(setup: Setup) -> Iterator[Finding]:
    """Steps with recorded passes and without, in turns; all stages of a size before the next."""
    for size in setup.size(FULL_SIZES, QUICK_SIZES):
        for table in setup.size(STAGES, (VANILLA,)):
            runs = {
                "launch by launch": Run(setup, table.build, size, None, table.timed),
                "recorded": Run(setup, table.build, size, new_recorder(setup), table.timed),
            }
            for run in runs.values():
                _warmed_up(setup, run)
            ms: dict[str, float] = {}
            for turn in range(2):
                for name, run in runs.items():
                    repeats = setup.size(30, 2)
                    found = milliseconds(setup.place, run.step, repeats=repeats, budget=1.0)
                    ms[name] = found if turn == 0 else min(found, ms[name])
            ratio = ms["recorded"] / ms["launch by launch"]
            shown = ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())
            what = f"{table.name}, {size.n:,}, {size.width} x {size.height}"
            yield Finding(what, True, f"{shown}, ratio {ratio:.2f}", {"ms": ms, "ratio": ratio})
            if runs["recorded"].warnings:
                yield warnings_of(runs["recorded"])
            del runs
            release_cached(setup.place)


def profiles(setup: Setup) -> Iterator[Finding]:
    """Kernels of recorded steps, in the order of their time; the table is among the figures."""
    for size in setup.size((FULL_SIZES[0], FULL_SIZES[-1]), QUICK_SIZES):
        run = _warmed_up(setup, Run(setup, VANILLA.build, size, new_recorder(setup), VANILLA.timed))
        activities = [ProfilerActivity.CPU]
        key = "self_cpu_time_total"
        if setup.on_cuda:
            activities.append(ProfilerActivity.CUDA)
            key = "self_cuda_time_total"
        with profile(activities=activities) as profiled:
            for _ in range(setup.size(PROFILED_STEPS, 2)):
                run.step()
            synchronize(setup.place)
        table = profiled.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=70)
        kinds = len(profiled.key_averages())
        shown = f"{kinds} kinds of operations; the table is in the JSON"
        yield Finding(f"vanilla, {size.n:,}", bool(kinds), shown, {"table": table})
        del run
        release_cached(setup.place)


def block_sizes(setup: Setup) -> Iterator[Finding]:
    """A step launched with blocks of one size, and with those of the rule."""
    size: Size = setup.size(FULL_SIZES[-1], QUICK_SIZES[0])
    rule = warp_launch.block_dim_of
    for block_dim in (None, *warp_launch.BLOCK_DIMS):
        choose = rule if block_dim is None else lambda kernel, n_items, size=block_dim: size
        with mock.patch.object(warp_launch, "block_dim_of", choose):
            run = _warmed_up(setup, Run(setup, VANILLA.build, size, None, VANILLA.timed))
            ms = milliseconds(setup.place, run.step, repeats=setup.size(20, 2), budget=1.0)
        name = "the rule" if block_dim is None else f"blocks of {block_dim}"
        yield Finding(f"{size.n:,}, {name}", True, f"{ms:.2f} ms", {"ms": ms})
        del run
        release_cached(setup.place)


CHECKS = (
    Check("profiles", profiles, 60),
    Check("time of a step", times, 300),
    Check("block sizes", block_sizes, 60),
)
