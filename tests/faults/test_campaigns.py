# SPDX-License-Identifier: Apache-2.0
"""A share of what ``benchmarks/fuzz.py`` and ``benchmarks/faults.py`` can do, at every change.

In processes of their own: children that are forked warm need a process without threads or a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_scene import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits, of Linux"),
]


def run(script: str, tmp_path: Path, *flags: object) -> tuple[str, list[dict]]:
    """What a campaign printed, and its results."""
    record = tmp_path / "results.json"
    command = [sys.executable, REPOSITORY / "benchmarks" / script, "--json", record, *flags]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert record.is_file(), done.stderr
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    faults = done.stdout if done.returncode else ""
    assert faults == "", faults
    return done.stdout, results


def test_rubbish_is_refused_in_one_line_or_does_no_harm(tmp_path):
    _, results = run("fuzz.py", tmp_path, "--cases", 288, "--seed", 20)
    assert len(results) == 288
    ends = [result["verdict"]["end"] for result in results]
    # Neither a harness that breaks nothing nor one that breaks everything tells anything.
    assert ends.count("refused") > 100
    assert ends.count("accepted") > 50


def test_a_disturbed_run_done_again_ends_with_the_same_bytes(tmp_path):
    _, results = run("faults.py", tmp_path, "--cases", 26, "--seed", 20)
    assert len(results) == 26
    assert sum(result["end"] != "accepted" for result in results) > 5


def test_a_case_repeats_itself(tmp_path):
    first, (one,) = run("fuzz.py", tmp_path, "--case", 4, "--seed", 20)
    again, (two,) = run("fuzz.py", tmp_path, "--case", 4, "--seed", 20)
    assert (one["what"], one["verdict"]) == (two["what"], two["verdict"])
    assert "exit code" in first
    assert "exit code" in again
