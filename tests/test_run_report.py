# SPDX-License-Identifier: Apache-2.0
"""The page of a training run says what its folder holds, and does without what it lacks."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.engine.reporting.run_logger import RunLogger
from gaussian_splatting.engine.reporting.run_report import (
    REPORT_FILE,
    add_run_section,
    last_value,
    read_curves,
    write_run_report,
)
from sugar_utils.html import Page

pytest.importorskip("tensorboard")


def log(folder: Path, first: int, last: int, value: float) -> None:
    with closing(RunLogger(folder / "tensorboard", first_iteration=first)) as logger:
        for iteration in range(first, last + 1):
            logger.scalars(
                {
                    "Loss/loss": value / iteration,
                    "Loss/color": value / iteration / 2,
                    "Gaussians/count": 100.0 + iteration,
                    "Test/PSNR": 20.0 + iteration,
                },
                iteration,
            )
            logger.histograms({"Parameters/x": torch.randn(5_000)}, iteration)
            logger.images({"view/render": np.zeros((40, 60, 3), dtype=np.uint8)}, iteration)


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of 9 iterations."""
    folder = tmp_path / "scene & co" / "sugarcoarse_x"
    log(folder, 1, 9, 4.0)
    record = {
        "status": "finished",
        "settings": {"seed": 77, "rates": {"means": 0.00016}},
        "timings": {
            "entropy": {"seconds": 30.0, "peak_bytes": 3 * 2**30},
            "geometry": {"seconds": 45.0, "peak_bytes": 2**30},
        },
    }
    (folder / "run.json").write_text(json.dumps(record))
    Image.fromarray(np.zeros((20, 80, 3), dtype=np.uint8)).save(folder / "views.png")
    (folder / "1200.pt").write_bytes(bytes(2048))
    return folder


def report_of(folder: Path) -> str:
    assert write_run_report(folder, pytest.fail) == folder / REPORT_FILE
    return (folder / REPORT_FILE).read_text(encoding="utf-8")


def test_a_report_tells_what_the_run_was_and_did(run):
    text = report_of(run)
    for words in (
        "scene &amp; co / sugarcoarse_x",
        "finished",
        "1 min 15 s",
        "3.00 GiB",
        "entropy",
        "29.00 dB",
        "0.4444",
        "109",
        "rates.means",
        "0.00016",
        "77",
        "1200.pt",
        "2.00 KiB",
        "Loss/color",
        "tensorboard --logdir",
    ):
        assert words in text, words
    assert text.count("<img ") == 1
    assert "was continued" not in text


def test_a_second_report_does_not_list_the_first(run):
    report_of(run)
    assert REPORT_FILE not in report_of(run)


def test_curves_come_back_without_what_a_resumed_run_replaced(run):
    log(run, 6, 12, 40.0)
    curves = read_curves(run / "tensorboard")
    assert [x for x, _ in curves["Loss/loss"]] == list(range(1, 13))
    values = [x * y for x, y in curves["Loss/loss"]]
    assert values == pytest.approx([4.0] * 5 + [40.0] * 7)
    assert last_value(curves, "Test/PSNR") == 32.0
    assert last_value(curves, "absent") is None
    assert "This run was continued" in report_of(run)


def test_scalars_are_found_between_pictures(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    with closing(RunLogger(tmp_path)) as logger:
        for iteration in range(1, 4):
            logger.images({"v": picture}, iteration)
            logger.scalars({"Loss/loss": 1.0}, iteration)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size > 500_000
    assert read_curves(tmp_path) == {"Loss/loss": [(1, 1), (2, 1), (3, 1)]}


def test_a_file_cut_short_gives_what_is_whole(run):
    (file,) = (run / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-30])
    assert len(read_curves(run / "tensorboard")["Loss/loss"]) >= 8
    file.write_bytes(b"")
    assert read_curves(run / "tensorboard") == {}


def test_what_follows_a_damaged_record_is_not_read(run):
    (file,) = (run / "tensorboard").iterdir()
    content = bytearray(file.read_bytes())
    content[content.rindex(b"Loss/loss")] ^= 1
    file.write_bytes(content)
    curves = read_curves(run / "tensorboard")
    assert {name: len(points) for name, points in curves.items()} == dict.fromkeys(
        ("Loss/loss", "Loss/color", "Gaussians/count", "Test/PSNR"), 8
    )


def test_without_tensorboard_there_are_no_curves_but_a_report(run, monkeypatch):
    loader = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, loader, None)
    assert read_curves(run / "tensorboard") == {}
    assert "Last value of each curve" not in report_of(run)


def test_a_bare_folder_has_a_report_that_says_so(tmp_path):
    text = report_of(tmp_path)
    assert "run.json" in text
    (tmp_path / "run.json").write_text('{"status": "running", "settings": {}}')
    assert "running" in report_of(tmp_path)


def test_a_single_measurement_is_a_figure(tmp_path):
    log(tmp_path, 1, 1, 4.0)
    assert "21.00 dB" in report_of(tmp_path)


def test_a_report_that_cannot_be_written_is_only_told(run):
    said: list[str] = []
    (run / REPORT_FILE).mkdir()
    assert write_run_report(run, said.append) is None
    assert len(said) == 1
    assert write_run_report(run / "absent" / "run.json" / "x", said.append) is None
    assert len(said) == 2


def test_a_damaged_record_costs_no_report(run):
    said: list[str] = []
    (run / "run.json").write_text('{"timings": {"a": {}}}')
    page = write_run_report(run, said.append)
    assert "run.json: Object missing required field" in page.read_text(encoding="utf-8")
    assert not said


def test_links_lead_from_where_the_page_is(run):
    page = Page("t")
    add_run_section(page, run, run.parent, {"colour": "blue", "status": "unknown"})
    text = page.html()
    assert 'href="sugarcoarse_x/1200.pt"' in text
    assert "blue" in text
    assert "unknown" not in text
