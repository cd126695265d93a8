# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's own reader reads the logs back."""

import io
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.engine.reporting.run_logger import (
    MAX_HISTOGRAM_VALUES,
    RunLogger,
    subsample,
)
from tests.support.limits import largest_file

REPOSITORY = Path(__file__).resolve().parent.parent
pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402


def read(directory) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"histograms": 0, "images": 0})
    return events.Reload()


def test_scalars_come_back_as_logged(tmp_path):
    with closing(RunLogger(tmp_path)) as logger:
        for iteration in (1, 2, 3):
            values = {"Loss/l1": torch.tensor(0.5 / iteration), "Gaussians": 100 * iteration}
            logger.scalars(values, iteration)
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {"Loss/l1", "Gaussians"}
    assert [(e.step, e.value) for e in events.Scalars("Gaussians")] == [
        (1, 100),
        (2, 200),
        (3, 300),
    ]
    assert [e.value for e in events.Scalars("Loss/l1")] == pytest.approx([0.5, 0.25, 0.5 / 3])


def test_resumed_run_replaces_what_came_after_its_start(tmp_path, monkeypatch):
    with closing(RunLogger(tmp_path)) as logger:
        for iteration in range(1, 8):
            logger.scalars({"loss": 1.0}, iteration)
    # Viewers read event files in the order of their names, which begin with whole seconds.
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1)
    with closing(RunLogger(tmp_path, first_iteration=5)) as logger:
        for iteration in range(5, 9):
            logger.scalars({"loss": 2.0}, iteration)
    points = [(e.step, e.value) for e in read(tmp_path).Scalars("loss")]
    assert points == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2)]


def test_histograms_are_subsampled_finite_and_repeatable(tmp_path):
    big = torch.randn(50_000, 3, generator=torch.Generator().manual_seed(0))
    broken = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    with closing(RunLogger(tmp_path)) as logger:
        logger.histograms({"means": big, "broken": broken, "empty": torch.empty(0)}, 10)
        logger.histograms({"huge": torch.full((3,), 1e30)}, 10)
    events = read(tmp_path)
    assert set(events.Tags()["histograms"]) == {"means", "broken", "huge"}
    (histogram,) = events.Histograms("means")
    assert histogram.step == 10
    assert histogram.histogram_value.num == MAX_HISTOGRAM_VALUES
    assert events.Histograms("broken")[0].histogram_value.num == 2
    assert np.array_equal(subsample(big, "means", 10), subsample(big, "means", 10))
    assert not np.array_equal(subsample(big, "means", 10), subsample(big, "means", 11))


def test_subsample_sees_all_columns():
    columns = torch.tensor([0.0, 1.0, 2.0]).repeat(100_000, 1)
    shares = np.bincount(subsample(columns, "means", 1).astype(int)) / MAX_HISTOGRAM_VALUES
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)
    small = torch.arange(5.0, requires_grad=True)
    assert subsample(small, "small", 1).tolist() == [0, 1, 2, 3, 4]


def test_images_of_bytes_floats_and_single_channels_come_back(tmp_path):
    ramp = torch.linspace(-0.5, 1.5, 12).reshape(2, 2, 3)
    ramp[0, 0, 0] = float("nan")
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    with closing(RunLogger(tmp_path)) as logger:
        logger.images({"float": ramp, "bytes": pixels, "depth": torch.full((4, 6), 0.5)}, 3)
    events = read(tmp_path)

    def decode(name):
        return np.asarray(Image.open(io.BytesIO(events.Images(name)[0].encoded_image_string)))

    expected = (np.nan_to_num(ramp.numpy()).clip(0, 1) * 255).round()
    assert np.array_equal(decode("float"), expected)
    assert np.array_equal(decode("bytes"), pixels)
    assert decode("depth").shape[:2] == (4, 6)
    assert np.unique(decode("depth")).tolist() == [128]


def test_missing_tensorboard_is_one_warning_and_no_logs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes = []
    with closing(RunLogger(tmp_path / "tensorboard", notify=notes.append)) as logger:
        logger.scalars({"loss": 1.0}, 1)
    assert len(notes) == 1
    assert "pip install tensorboard" in notes[0]


def test_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    notes = []
    RunLogger(tmp_path / "file" / "tensorboard", notify=notes.append).scalars({"loss": 1.0}, 1)
    assert len(notes) == 1


def test_full_disk_ends_logging_with_one_warning(tmp_path, monkeypatch):
    notes = []
    logger = RunLogger(tmp_path, notify=notes.append)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger._records, "write", fail)
    logger.scalars({"a": 1.0, "b": 2.0}, 1)
    logger.scalars({"a": 1.0}, 2)
    logger.close()
    assert notes == ["TensorBoard logs are not continued: No space left on device"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("last", ["scalars", "close"])
def test_disk_that_fills_up_is_one_warning_and_nothing_else(tmp_path, monkeypatch, capfd, last):
    real_open, notes = Path.open, []

    def full(path, *args, **kwargs):
        inner = real_open(Path("/dev/full") if "tfevents" in path.name else path, *args, **kwargs)
        return Later(inner) if "tfevents" in path.name else inner

    class Later:
        """A file on a disk that is full from the second flush on."""

        def __init__(self, file):
            self.file, self.room = file, io.BytesIO()

        def write(self, data):
            return (self.room or self.file).write(data)

        def flush(self):
            self.room = None
            self.file.flush()

        def close(self):
            self.file.close()

    monkeypatch.setattr(Path, "open", full)
    logger = RunLogger(tmp_path, notify=notes.append)
    for step in range(2000 if last == "scalars" else 1):
        logger.scalars({"a": 1.0}, step)
    logger.close()
    assert notes == ["TensorBoard logs are not continued: No space left on device"]
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_file_that_reaches_its_limit_is_one_warning(tmp_path, capfd):
    notes = []
    with largest_file(20_000), closing(RunLogger(tmp_path, notify=notes.append)) as logger:
        for step in range(5_000):
            logger.scalars({"a": 1.0}, step)
    assert notes == ["TensorBoard logs are not continued: File too large"]
    assert "".join(capfd.readouterr()) == ""
    assert len(read(tmp_path).Scalars("a")) > 100


def test_names_are_shown_in_one_line(tmp_path):
    with closing(RunLogger(tmp_path)) as logger:
        logger.scalars({"a\nb": 1.0}, 1)
    assert read(tmp_path).Tags()["scalars"] == [r"a\nb"]
