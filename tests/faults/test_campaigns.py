# SPDX-License-Identifier: Apache-2.0
"""A share of what the campaigns of ``benchmarks/robustness/`` can do, at every change.

In processes of their own: children that are forked warm need a process without threads or a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_scene import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits, of Linux"),
]


def run(script: str, tmp_path: Path, *flags: object) -> tuple[str, list[dict]]:
    """Run a campaign; return its output and its results."""
    record = tmp_path / "results.json"
    command = [
        sys.executable,
        REPOSITORY / "benchmarks" / "robustness" / script,
        # The other core has tests of its own.
        *("--jobs", 1, "--json", record),
        *flags,
    ]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert record.is_file(), done.stderr
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    faults = done.stdout if done.returncode else ""
    assert faults == "", faults
    return done.stdout, results


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> list[dict]:
    """Two cases of every reader."""
    return run("readers.py", tmp_path_factory.mktemp("read"), "--cases", 74, "--seed", 20)[1]


def count_ends(results: list[dict], end: str) -> int:
    return sum(result["end"] == end for result in results)


# Neither a harness that breaks nothing nor one that breaks everything tells anything.


def test_malformed_input_is_refused_in_one_line_or_does_no_harm(tmp_path):
    """Two cases of every kind."""
    _, results = run("fuzz.py", tmp_path, "--cases", 60, "--seed", 20)
    assert len(results) == 60
    assert count_ends(results, "refused") > 20
    assert count_ends(results, "accepted") > 10


def test_damaged_files_are_refused_or_read_as_finite_numbers(read):
    assert len(read) == 74
    assert count_ends(read, "refused") > 20
    assert count_ends(read, "accepted") > 30


def test_a_case_repeats_itself(read, tmp_path):
    said, (again,) = run("readers.py", tmp_path, "--case", 9, "--seed", 20)
    (first,) = (result for result in read if result["case"] == 9)
    assert all(first[key] == again[key] for key in ("what", "end", "faults"))
    assert "exit code" in said


def test_a_disturbed_run_done_again_ends_with_the_same_bytes(tmp_path):
    """One disturbance of every scenario."""
    _, results = run("faults.py", tmp_path, "--cases", 21, "--seed", 20)
    assert len(results) == 21
    assert sum(result["end"] != "accepted" for result in results) > 3
