# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it trains: progress fields, TensorBoard, held-out views."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.images import ImageStore, outlined
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.model import SHOWN_VALUES
from gaussian_splatting.engine.reporting import view_findings
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.engine.stage import Stage
from sugar_utils.console import Console
from sugar_utils.errors import Notify, printable
from sugar_utils.memory import format_bytes, memory_usage, reset_peak
from sugar_utils.random import generator

MAX_HISTOGRAM_VALUES = 10_000
Activation = Callable[[Tensor], Tensor]
_FLUSH_SECONDS = 120.0
_FILE_VERSION = "brain.Event:2"
_POSITIVE_BINS = [1e-8 * 1.25**i for i in range(187)]  # up to 1e10; viewers show thirty
_BINS = [*(-edge for edge in reversed(_POSITIVE_BINS)), 0.0, *_POSITIVE_BINS]

N_PICTURED_VIEWS = 3


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
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError as error:
            notify(f"no TensorBoard logs ({error}); pip install tensorboard to have them")
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
            self._add(first_iteration, session_log=SessionLog(status=SessionLog.START))

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
        for name, tensor in tensors.items() if self._file is not None else ():
            values = subsample(tensor, name, iteration, (activations or {}).get(name))
            values = values.clip(_BINS[0], _BINS[-1])
            if values.size > 0:
                found = self._summary.histogram(printable(name), values, _BINS)
                self._add(iteration, summary=found)

    def images(self, images: Mapping[str, Tensor | np.ndarray], iteration: int) -> None:
        """Add pictures by name: (H, W, 3) or (H, W), uint8 or float in [0, 1], NaN shown black."""
        for name, image in images.items() if self._file is not None else ():
            pixels = torch.as_tensor(image).detach()
            if pixels.dtype.is_floating_point:
                pixels = torch.nan_to_num(pixels, nan=0.0)
            array = to_uint8(pixels).cpu().numpy()
            layout = "HW" if array.ndim == 2 else "HWC"
            found = self._summary.image(printable(name), array, dataformats=layout)
            self._add(iteration, summary=found)

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warn(error)

    def _add(self, iteration: int, **content: Any) -> None:
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


class Reporter(contextlib.AbstractContextManager):
    def __init__(
        self,
        stage: Stage,
        console: Console,
        tensorboard_dir: Path,
        first_iteration: int,
        scene: Scene,
        timings: dict[str, dict[str, float]] | None = None,
    ) -> None:
        self._held_out_note = f" ({scene.held_out_note})" if scene.held_out_note else ""
        self.figures: dict[str, Any] = {}
        self.health: dict[str, float] = {}
        self._stage = stage
        self._console = console
        self._scene = scene
        pictured = scene.test_cameras or scene.train_cameras
        stride = max(1, len(pictured) // N_PICTURED_VIEWS)
        self._pictured = list(pictured[::stride])[:N_PICTURED_VIEWS]
        self.logger = RunLogger(tensorboard_dir, first_iteration, notify=console.warn)
        self._pictures: list[dict[str, Tensor]] = []
        self._worst: list[dict[str, Tensor]] = []
        self._phase: str | None = None
        self._phase_started = time.perf_counter()
        self._phases = dict(timings or {})
        self.held_out: dict[str, dict[str, float]] = {}
        """Means of the last evaluation, over whole pictures and what masks count of them."""

    def __exit__(self, *exception: object) -> None:
        self._leave_phase()
        self.logger.close()

    def enter_phase(self, phase: str) -> None:
        """Start a new peak-memory measurement when the schedule enters another phase."""
        if phase == self._phase:
            return
        self._leave_phase()
        self._phase = phase
        self._phase_started = time.perf_counter()
        reset_peak(self._stage.model.device)

    def fields(self, terms: dict[str, Tensor]) -> dict[str, str]:
        """Short texts for the progress display; reads the terms off the device."""
        shown = {name: f"{float(value):.4f}" for name, value in terms.items()}
        shown["gaussians"] = f"{len(self._stage.model):,}"
        shown["memory"] = format_bytes(memory_usage(self._stage.model.device).current)
        return shown

    def log(self, iteration: int, terms: dict[str, Tensor]) -> None:
        model = self._stage.model
        usage = memory_usage(model.device)
        scalars = {
            **{f"Loss/{name}": value for name, value in terms.items()},
            **{f"LearningRate/{n}": v for n, v in model.optimizer.learning_rates().items()},
            "Gaussians/count": float(len(model)),
            f"Memory/{usage.kind}_GiB": usage.current / 2**30,
            f"Memory/peak_{self._phase}_GiB": usage.peak / 2**30,
        }
        self.logger.scalars(scalars, iteration)
        values = {f"Parameters/{name}": found for name, found in model.distributions().items()}
        shown = {f"Parameters/{name}": function for name, function in SHOWN_VALUES.items()}
        self.logger.histograms(values, iteration, shown)

    def evaluate(self, iteration: int, images: ImageStore) -> None:
        with torch.no_grad():
            scene = self._scene
            found = view_findings.find(
                self._stage,
                scene.test_cameras,
                scene.train_cameras,
                images.shown,
                scene.observations,
                scene.dropped_test_cameras,
            )
            self.logger.scalars({tag: value for tag, _, value in found.values()}, iteration)
            for line in found.lines(self._held_out_note):
                self._console.info(f"iteration {iteration}: {line}")
            advice = found.advice()
            if advice is not None:
                finding, remedy = advice
                self._console.warn(f"iteration {iteration}: {finding}", remedy)
            self.figures = found.record()
            self.health = found.health()
            self._picture_worst(found, images)
            self.held_out = found.whole_and_counted()
            metrics: dict[str, list[float]] = {}
            self._pictures.clear()
            for camera in self._pictured:
                output = self._stage.render(camera, geometry=True)
                pictures = view_findings.view_pictures(output, outlined(images.shown(camera)))
                pictures |= self._stage.view_maps(camera)
                named = {f"{camera.name}/{name}": picture for name, picture in pictures.items()}
                self.logger.images(named, iteration)
                self._pictures.append(pictures)
                for name, value in self._stage.view_metrics(camera, output).items():
                    metrics.setdefault(name, []).append(value)
            means = {name: sum(values) / len(values) for name, values in metrics.items()}
            self.logger.scalars({f"View/{name}": v for name, v in means.items()}, iteration)
            for name, value in means.items():
                self._console.info(f"iteration {iteration}: {name} {value:.4f}")

    def write_pictures(self, folder: Path) -> None:
        """Write the pictures of the last evaluation as one PNG, and those that fit worst."""
        if self._worst:
            view_findings.write_contact_sheet(folder / view_findings.WORST_FILE, self._worst)
        if self._pictures:
            path = folder / "views.png"
            view_findings.write_contact_sheet(path, self._pictures)
            self._console.info(f"photograph, render, depth and normals: {path}")

    def results(self) -> dict[str, Any]:
        """What the last evaluation found, for the record of the run; without what is empty."""
        results = {"figures": self.figures, "held_out": self.held_out, "health": self.health}
        return {name: values for name, values in results.items() if values}

    def summary(self) -> dict[str, Any]:
        """Seconds and peak bytes of each phase, earlier processes included."""
        self._leave_phase()
        return self._phases

    def _picture_worst(self, found: view_findings.Findings, images: ImageStore) -> None:
        scene = self._scene
        cameras = {c.name: c for c in (*scene.train_cameras, *scene.test_cameras)}
        self._worst.clear()
        for score in found.worst():
            camera = cameras[score.name]
            render = to_uint8(self._stage.render(camera, geometry=False).image)
            pair = {"photograph": outlined(images.shown(camera)), "render": render}
            self._worst.append({name: view_findings.thumbnail(p.cpu()) for name, p in pair.items()})

    def _leave_phase(self) -> None:
        if self._phase is None:
            return
        seconds = time.perf_counter() - self._phase_started
        peak = memory_usage(self._stage.model.device).peak
        earlier = self._phases.get(self._phase, {"seconds": 0.0, "peak_bytes": 0})
        self._phases[self._phase] = {
            "seconds": earlier["seconds"] + seconds,
            "peak_bytes": max(earlier["peak_bytes"], peak),
        }
        self._phase = None
