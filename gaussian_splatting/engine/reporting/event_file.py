# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event file, written by the thread that has something to log.

TensorBoard's own writer hands everything to a thread. Where the disk is full that thread prints a
traceback and ends, and what it failed at surfaces at some later call, or never. Import this
module where TensorBoard may be missing, and expect an ``ImportError``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

_FLUSH_SECONDS = 120.0
_FILE_VERSION = "brain.Event:2"


class DirectSummaryWriter(SummaryWriter):
    """torch's ``SummaryWriter`` whose calls raise what goes wrong while they write.

    Args:
        purge_step: Viewers drop what earlier files say from this step on; None for nothing.

    Raises:
        OSError: From every call, where the file cannot be written.
    """

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        super().__init__(str(directory), purge_step=purge_step)

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _DirectFileWriter(Path(self.log_dir))
            self.all_writers = {self.log_dir: self.file_writer}
            self.file_writer.add_event(Event(file_version=_FILE_VERSION))
            if self.purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self.file_writer.add_event(Event(file_version=_FILE_VERSION), self.purge_step)
                self.file_writer.add_event(Event(session_log=start), self.purge_step)
            self.file_writer.flush()
        return self.file_writer

    def abandon(self) -> None:
        """Close the file; what cannot be written any more is dropped."""
        if self.file_writer is not None:
            with contextlib.suppress(OSError):
                self.file_writer.close()


class _DirectFileWriter(FileWriter):
    """Makes events of summaries as torch's does, for another kind of file."""

    def __init__(self, directory: Path) -> None:
        self.event_writer = _EventFile(directory)


class _EventFile:
    """The part of TensorBoard's ``EventFileWriter`` that torch calls."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        # Seconds, machine and process tell files apart, as in TensorBoard's own names; the
        # fraction those of one second.
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self._records = RecordWriter(self._file)
        self._flushed = time.monotonic()

    def get_logdir(self) -> str:
        return str(self._directory)

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
