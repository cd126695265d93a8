# SPDX-License-Identifier: Apache-2.0
"""A share of what the campaigns of ``benchmarks/robustness/`` can do, at every change.

In a process of their own: children that are forked warm need one without threads or a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.support.tiny_scene import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits, of Linux"),
]


PROGRAM = """
import json, sys
from contextlib import redirect_stdout
from importlib import import_module

for script, words, output, code_file in json.loads(sys.argv[1]):
    sys.argv = [script, *words]
    with open(output, "w") as file, redirect_stdout(file):
        code = import_module(f"benchmarks.robustness.{script}").main()
    with open(code_file, "w") as file:
        file.write(str(code))
"""
"""Campaigns one after the other: what children need is loaded once."""


@dataclass(frozen=True)
class Campaign:
    """A campaign that was run: what it printed, and its results."""

    output: str
    results: list[dict]


CAMPAIGNS: dict[str, tuple[str, tuple[object, ...]]] = {
    "one case": ("readers", ("--case", 9)),
    "every reader": ("readers", ("--cases", 74)),
    "every kind of input": ("fuzz", ("--cases", 60)),
    "every scenario": ("faults", ("--cases", 21)),
}
"""Scripts and flags: two cases of every reader and kind, one disturbance of every scenario."""


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory) -> dict[str, Campaign]:
    """All campaigns by name; none found a fault."""
    root = tmp_path_factory.mktemp("campaigns")
    orders = []
    for name, (script, flags) in CAMPAIGNS.items():
        # The other core has tests of its own.
        words = [*flags, "--jobs", 1, "--seed", 20, "--json", root / f"{name}.json"]
        files = [str(root / f"{name}.{suffix}") for suffix in ("txt", "code")]
        orders.append([script, [str(word) for word in words], *files])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(orders)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        # A forked child must find no threads of a GPU driver or of a thread pool.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for name in CAMPAIGNS:
        output = (root / f"{name}.txt").read_text(encoding="utf-8")
        assert (root / f"{name}.code").read_text() == "0", output
        record = json.loads((root / f"{name}.json").read_text(encoding="utf-8"))
        found[name] = Campaign(output, record["results"])
    return found


def count_ends(results: list[dict], end: str) -> int:
    return sum(result["end"] == end for result in results)


# Neither a harness that breaks nothing nor one that breaks everything tells anything.


def test_malformed_input_is_refused_in_one_line_or_does_no_harm(campaigns):
    results = campaigns["every kind of input"].results
    assert len(results) == 60
    assert count_ends(results, "refused") > 20
    assert count_ends(results, "accepted") > 10


def test_damaged_files_are_refused_or_read_as_finite_numbers(campaigns):
    read = campaigns["every reader"].results
    assert len(read) == 74
    assert count_ends(read, "refused") > 20
    assert count_ends(read, "accepted") > 30


def test_a_case_repeats_itself(campaigns):
    alone = campaigns["one case"]
    (first,) = alone.results
    (again,) = (result for result in campaigns["every reader"].results if result["case"] == 9)
    assert all(first[key] == again[key] for key in ("what", "end", "faults"))
    assert "exit code" in alone.output


def test_a_disturbed_run_done_again_ends_with_the_same_bytes(campaigns):
    results = campaigns["every scenario"].results
    assert len(results) == 21
    assert sum(result["end"] != "accepted" for result in results) > 3
