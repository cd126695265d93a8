# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of the coarse stage's geometric step on a device.

The settings are those of ``benchmarks/memory.py``: the naive step, the default one, and one thing
changed at a time. Memory is torch's, allocated at most; Warp has none of its own but its code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import memory
from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck, milliseconds, synchronize
from benchmarks.memory import Setting
from sugar_utils.memory import format_bytes, out_of_memory, release_cached
from tests.support.step_scenes import large_cloud, photograph

WIDTH, HEIGHT = 1920, 1244
SIZES = (1_000_000, 6_000_000)


def _settings(setup: Setup, n: int) -> dict[str, Setting]:
    sizes = setup.size((n, WIDTH, HEIGHT, 1_000_000), (400, 48, 36, 500))
    args = dict(zip(("gaussians", "width", "height", "samples"), sizes, strict=True))
    chosen = memory.table_settings(argparse.Namespace(**args, strips=4))[:10]
    return {memory.describe_setting(setting): setting for setting in chosen}


def _peak_of(setup: Setup, work: Callable[[], object]) -> int:
    """Bytes of torch's tensors when most were alive; 0 on a CPU."""
    if not setup.on_cuda:
        work()
        return 0
    synchronize(setup.place)
    torch.cuda.reset_peak_memory_stats(setup.place)
    work()
    synchronize(setup.place)
    return torch.cuda.max_memory_allocated(setup.place)


def _measure(setup: Setup, setting: Setting) -> Finding:
    made = large_cloud(setting.n, setting.width, setting.height, setup.place)
    started = time.perf_counter()
    stage, camera = memory.make_stage(setting, made)
    synchronize(setup.place)
    searched = time.perf_counter() - started
    del made
    target = photograph(camera).to(setup.place)
    optimizer = stage.model.optimizer

    def terms() -> None:
        memory.step(stage, setting, camera, target)

    def iteration() -> None:
        terms()
        optimizer.step()

    # The first one makes the moments and loads kernels.
    iteration()
    release_cached(setup.place)
    predicted = memory.predict_step(stage, setting, camera)
    peaks = {"terms": _peak_of(setup, terms), "step": _peak_of(setup, optimizer.step)}
    ms = milliseconds(setup.place, iteration, repeats=8, budget=3.0)
    finite = all(bool(p.isfinite().all()) for p in optimizer.parameters.values())
    shown = f"{ms:.1f} ms per iteration, neighbours {searched:.2f} s"
    if setup.on_cuda:
        shown += "".join(f", {name} {format_bytes(peak)}" for name, peak in peaks.items())
    if setting.phase != "naive" and setup.on_cuda:
        shown += f", predicted {format_bytes(predicted)} ({peaks['terms'] / predicted - 1:+.1%})"
    if not finite:
        shown += ", parameters are not finite"
    figures = {"ms": ms, "neighbors_s": searched, "peak_bytes": peaks, "n": setting.n}
    figures["predicted_bytes"] = predicted
    return Finding("", finite, shown, figures)


def _at(n: int) -> Callable[[Setup], Iterator[Finding]]:
    def run(setup: Setup) -> Iterator[Finding]:
        if setup.quick and n != SIZES[0]:
            raise SkipCheck("a quick try takes one size")
        naive = 0
        for name, setting in _settings(setup, n).items():
            try:
                finding = _measure(setup, setting)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                finding = Finding("", True, "does not fit into the memory of this device")
            finding.what = name
            peak = finding.figures.get("peak_bytes", {}).get("terms", 0)
            naive = naive or peak
            if naive and peak:
                finding.shown += f", {peak / naive:.2f} of the naive peak"
            yield finding
            release_cached(setup.place)

    return run


CHECKS = tuple(Check(f"{n:,} Gaussians", _at(n), 240) for n in SIZES)
