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
        "--json",
        record,
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
def fuzzed(tmp_path_factory) -> list[dict]:
    """Ten cases of every kind."""
    return run("fuzz.py", tmp_path_factory.mktemp("fuzz"), "--cases", 300, "--seed", 20)[1]


def test_malformed_input_is_refused_in_one_line_or_does_no_harm(fuzzed):
    assert len(fuzzed) == 300
    ends = [result["end"] for result in fuzzed]
    # Neither a harness that breaks nothing nor one that breaks everything tells anything.
    assert ends.count("refused") > 100
    assert ends.count("accepted") > 50


def test_files_in_other_forms_read_the_same_and_damaged_ones_are_refused(tmp_path):
    """Five cases of every reader."""
    _, results = run("readers.py", tmp_path, "--cases", 200, "--seed", 20)
    assert len(results) == 200
    ends = [result["end"] for result in results]
    assert ends.count("refused") > 50
    assert ends.count("accepted") > 80


def test_a_case_repeats_itself(fuzzed, tmp_path):
    said, (again,) = run("fuzz.py", tmp_path, "--case", 9, "--seed", 20)
    (first,) = (result for result in fuzzed if result["case"] == 9)
    assert all(first[key] == again[key] for key in ("what", "end", "faults"))
    assert "exit code" in said


def test_a_disturbed_run_done_again_ends_with_the_same_bytes(tmp_path):
    _, results = run("faults.py", tmp_path, "--cases", 40, "--seed", 20)
    assert len(results) == 40
    assert sum(result["end"] != "accepted" for result in results) > 5
