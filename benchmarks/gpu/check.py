# SPDX-License-Identifier: Apache-2.0
"""All checks of a GPU in one command: ``python benchmarks/gpu/check.py``.

Prints a table, writes JSON with ``--json``, and ends within ``--minutes``. Exit code 1 if a check
FAILED. ``--sections`` chooses some, and ``--quick --device cpu`` tries the checks without a GPU.

Each section runs in a process of its own, because an illegal access in one kernel makes every
later call of its process fail. A check that fails, crashes or hangs ends the process, and a new one
continues with the next check. On CUDA the check then runs once more with launches that block, so
that the traceback names the call at fault.

``benchmarks/pack_for_gpu.sh`` carries packages to a machine that has Python and torch with CUDA but
no network.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.gpu.runner import FAILED, OK, SKIPPED, Row, Runner, Section
from sugar_utils.entrypoint import run_main
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, positive_float

SECTIONS = tuple(
    Section(name, f"benchmarks.gpu.{name}", seconds, is_apart=name == "recorder")
    for name, seconds in (
        ("environment", 20),
        ("compilation", 30),
        ("recorder", 50),
        ("recorded", 60),
        ("parity", 60),
        ("recorded_times", 80),
        ("training", 70),
        ("host_bands", 30),
        ("determinism", 40),
        ("sanitizer", 40),
        ("timing", 20),
        ("step", 20),
        ("comparison", 10),
    )
)
"""What was never run on a GPU comes first, then what else hangs on it; seconds are shares of the
whole time, and what a section leaves over is for those after it."""


def work(order: dict[str, Any]) -> int:
    """Run checks in this process and write what is found to a journal."""
    with open(order["journal"], "a", encoding="utf-8") as journal:

        def tell(event: str, **fields: Any) -> None:
            journal.write(json.dumps({"event": event, **_finite(fields)}) + "\n")
            journal.flush()

        # Here and not above: the process that watches must not hold memory of the device.
        from benchmarks.gpu.common import Setup, SkipCheck, synchronize, torch
        from sugar_utils.device import choose_device

        setup = Setup(**order["setup"])
        if setup.on_cuda and not torch.cuda.is_available():
            # Says in one line why there is none.
            choose_device("cuda", setup.place.index)
        checks = importlib.import_module(order["module"]).CHECKS
        tell("checks", checks=[check.name for check in checks])
        for check in checks:
            if order["checks"] is not None and check.name not in order["checks"]:
                continue
            tell("start", check=check.name)
            started = time.perf_counter()
            # Ends the process, also where native code hangs.
            faulthandler.dump_traceback_later(check.seconds, exit=True)
            try:
                for finding in check.run(setup):
                    # An error of a kernel must come up before its finding counts.
                    synchronize(setup.place)
                    tell("finding", check=check.name, **asdict(finding))
                synchronize(setup.place)
            except SkipCheck as reason:
                tell("skipped", check=check.name, reason=str(reason))
                continue
            # Whatever a check runs into is its result.
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                tell("error", check=check.name, reason=reason, trace=traceback.format_exc())
                if setup.on_cuda:
                    # This process may be unable to do anything more on the device.
                    return 0
                continue
            finally:
                faulthandler.cancel_dump_traceback_later()
            tell("end", check=check.name, seconds=time.perf_counter() - started)
            if order["is_apart"]:
                return 0
            gc.collect()
            if setup.on_cuda:
                torch.cuda.empty_cache()
    return 0


def _finite(value: Any) -> Any:
    """The same without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_all(
    sections: Sequence[Section], setup: dict[str, Any], minutes: float, path: Path | None = None
) -> list[Row]:
    """Run sections one after the other, print their rows, and write them after each."""
    rows: list[Row] = []
    started, total = time.monotonic(), sum(section.share for section in sections)
    share = 0.0
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        for section in sections:
            share += section.share
            begun, own = time.monotonic(), Path(folder) / section.module
            deadline = started + 60 * minutes * share / total
            runner = Runner(section, {**setup, "work": str(own)}, deadline, own)
            runner.run()
            if setup["device"] != "cpu":
                runner.explain()
            rows += runner.rows
            print(f"\n{section.name}, {time.monotonic() - begun:.0f} s", flush=True)
            for row in runner.rows:
                print(f"  {row.status:8}{row.check:22} {row.what:34} {row.shown}", flush=True)
            if path is not None:
                seconds = time.monotonic() - started
                record = {"setup": setup, "seconds": seconds, "rows": [asdict(r) for r in rows]}
                write_json_atomic(path, record)
    return rows


def print_summary(rows: Sequence[Row]) -> None:
    print(f"\n| section{'':11} | ok | FAILED | skipped |\n|{'-' * 20}|---:|-------:|--------:|")
    for name in dict.fromkeys(row.section for row in rows):
        counts = Counter(row.status for row in rows if row.section == name)
        print(f"| {name:18} | {counts[OK]:2} | {counts[FAILED]:6} | {counts[SKIPPED]:7} |")
    for row in rows:
        if row.status == FAILED:
            print(f"FAILED {row.section}, {row.check}: {row.what or '-'}: {row.shown}")


def parser() -> argparse.ArgumentParser:
    names = ", ".join(section.name for section in SECTIONS)
    result = Parser(
        description="Check everything on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--device", default="cuda", help="cuda, cuda:1, ..., or cpu")
    add("--json", type=Path, help="also write all figures to this file")
    add("--minutes", type=positive_float, default=8.0, help="time for everything")
    add("--sections", default="all", help=f"some of these, separated by commas: {names}")
    add("--scene", type=Path, help="capture to train on; unset: the built-in demo scene")
    add("--quick", action="store_true", help="tiny sizes, for a try on the CPU")
    add("--worker", help=argparse.SUPPRESS)
    return result


def main() -> int:
    flags = parser()
    args = flags.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    chosen = [name.strip() for name in args.sections.split(",")]
    sections = [s for s in SECTIONS if args.sections == "all" or s.name in chosen]
    if not sections:
        flags.error(f"--sections {args.sections}: there is none of them")
    scene = None if args.scene is None else str(args.scene.resolve())
    setup = {"device": args.device, "quick": args.quick, "scene": scene}
    rows = check_all(sections, setup, args.minutes, args.json)
    print_summary(rows)
    return int(any(row.status == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(run_main(main))
