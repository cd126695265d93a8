# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files of a run: scalars, histograms and pictures."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.random import generator
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from sugar_utils.errors import Notify, printable
from sugar_utils.libraries import install_advice

MAX_HISTOGRAM_VALUES = 10_000
Activation = Callable[[Tensor], Tensor]
_FLUSH_SECONDS = 120.0
_FILE_VERSION = "brain.Event:2"
_POSITIVE_BINS = [1e-8 * 1.25**i for i in range(187)]  # up to 1e10; viewers show thirty
_BINS = [*(-edge for edge in reversed(_POSITIVE_BINS)), 0.0, *_POSITIVE_BINS]


class RunLogger:
    """Writes the TensorBoard event file of one run, in the thread that has something to log.

    TensorBoard's own writer hands everything to a thread, which prints a traceback and ends where
    the disk is full. Here that, and a missing TensorBoard, is one warning, and training goes on.

    Args:
        first_iteration: First iteration of this process when it continues a run. Viewers drop what
            the earlier process wrote from there on, so that curves do not double back.
    """

    def __init__(
        self,
        directory: Path,
        first_iteration: int | None = None,
        notify: Notify = lambda message: None,
    ) -> None:
        self._notify = notify
        self._file: BinaryIO | None = None
        try:
            # Its classes are made when it is imported.
            from tensorboard.compat.proto.event_pb2 import (
                Event,  # pyright: ignore[reportAttributeAccessIssue]
                SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
            )
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError as error:
            notify(f"no TensorBoard logs ({error}); {install_advice('tensorboard')}")
            return
        self._event = Event
        self._summary = summary
        # Seconds, machine and process tell files apart, as in TensorBoard's own names; the
        # fraction those of one second.
        name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / name).open("wb")
        except OSError as error:
            notify(f"no TensorBoard logs: cannot write {directory}: {error.strerror or error}")
            return
        self._records = RecordWriter(self._file)
        self._flushed = -_FLUSH_SECONDS
        self._add(0, file_version=_FILE_VERSION)
        if first_iteration is not None:
            self._add(first_iteration, file_version=_FILE_VERSION)
            start = SessionLog(status=SessionLog.START)
            self._add(first_iteration, session_log=start)

    def scalars(self, values: Mapping[str, float | Tensor], iteration: int) -> None:
        """Add one point to each curve; tensors on a device are read with one copy."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if self._file is None:
            return
        numbers = dict(values)
        if tensors:
            stacked = torch.stack([v.detach().reshape(()).double() for v in tensors.values()])
            numbers.update(zip(tensors, stacked.tolist(), strict=True))
        for name, value in numbers.items():
            self._add(iteration, summary=self._summary.scalar(printable(name), float(value)))

    def histograms(
        self,
        tensors: Mapping[str, Tensor],
        iteration: int,
        activations: Mapping[str, Activation] | None = None,
    ) -> None:
        """Add the distribution of values of each tensor; see :func:`subsample`."""
        if self._file is None:
            return
        for name, tensor in tensors.items():
            activation = None if activations is None else activations.get(name)
            values = subsample(tensor, name, iteration, activation)
            values = values.clip(_BINS[0], _BINS[-1])
            if values.size > 0:
                histogram = self._summary.histogram(printable(name), values, _BINS)
                self._add(iteration, summary=histogram)

    def images(self, images: Mapping[str, Tensor | np.ndarray], iteration: int) -> None:
        """Add pictures by name: (H, W, 3) or (H, W), uint8 or float in [0, 1], NaN shown black."""
        if self._file is None:
            return
        for name, image in images.items():
            pixels = torch.as_tensor(image).detach()
            if pixels.dtype.is_floating_point:
                pixels = torch.nan_to_num(pixels, nan=0.0)
            array = to_uint8(pixels).cpu().numpy()
            layout = "HW" if array.ndim == 2 else "HWC"
            picture = self._summary.image(printable(name), array, dataformats=layout)
            self._add(iteration, summary=picture)

    def close(self) -> None:
        """Close the file; what follows is not written."""
        file = self._file
        self._file = None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warn(error)

    def _add(self, iteration: int, **content: object) -> None:
        if self._file is None:
            return
        event = self._event(wall_time=time.time(), step=int(iteration), **content)
        try:
            self._records.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            file = self._file
            self._file = None
            with contextlib.suppress(OSError):
                file.close()
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        self._notify(f"TensorBoard logs are not continued: {error.strerror or error}")


def subsample(
    tensor: Tensor, name: str, iteration: int, activation: Activation | None = None
) -> np.ndarray:
    """At most ``MAX_HISTOGRAM_VALUES`` finite values of a tensor, chosen by name and iteration."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > MAX_HISTOGRAM_VALUES:
        # Random, not every n-th: a stride that is a multiple of 3 would see only the x of xyz.
        draws = generator(0, "histogram", name, iteration)
        chosen = torch.randint(flat.numel(), (MAX_HISTOGRAM_VALUES,), generator=draws, device="cpu")
        flat = flat[chosen.to(flat.device)]
    values = (flat.float() if activation is None else activation(flat.float())).cpu()
    return values[values.isfinite()].numpy()
