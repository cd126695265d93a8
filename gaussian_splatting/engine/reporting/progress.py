# SPDX-License-Identifier: Apache-2.0
"""Reports during training: progress fields, curves, evaluations, pictures, times."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.images import ImageStore, outlined
from gaussian_splatting.engine.model import SHOWN_VALUES
from gaussian_splatting.engine.reporting import view_findings, view_pictures
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.engine.reporting.run_logger import RunLogger
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.console import Console
from sugar_utils.memory import format_bytes, memory_usage, reset_peak

N_PICTURED_VIEWS = 3


class Reporter(contextlib.AbstractContextManager):
    """Measures and logs a stage while it trains; the loop of the first process owns one.

    Args:
        first_iteration: Of this process.
        timings: Seconds and peak bytes of each phase of earlier processes.
    """

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
        self._pictured = about(pictured, N_PICTURED_VIEWS)[:N_PICTURED_VIEWS]
        self.logger = RunLogger(tensorboard_dir, first_iteration, notify=console.warn)
        self._pictures: list[dict[str, Tensor]] = []
        self._worst: list[dict[str, Tensor]] = []
        self._phase: str | None = None
        self._phase_started = time.perf_counter()
        self._phases = dict(timings or {})
        # Means of the last evaluation, over whole pictures and what masks count of them.
        self.held_out: dict[str, dict[str, float]] = {}

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
        fields = {name: f"{float(value):.4f}" for name, value in terms.items()}
        fields["gaussians"] = f"{len(self._stage.model):,}"
        fields["memory"] = format_bytes(memory_usage(self._stage.model.device).current)
        return fields

    def log(self, iteration: int, terms: dict[str, Tensor]) -> None:
        """Log terms, learning rates, memory, and the distributions of parameters."""
        model = self._stage.model
        usage = memory_usage(model.device)
        scalars: dict[str, float | Tensor] = {}
        for name, value in terms.items():
            scalars[f"Loss/{name}"] = value
        for name, rate in model.optimizer.learning_rates().items():
            scalars[f"LearningRate/{name}"] = rate
        scalars["Gaussians/count"] = float(len(model))
        scalars[f"Memory/{usage.kind}_GiB"] = usage.current / 2**30
        scalars[f"Memory/peak_{self._phase}_GiB"] = usage.peak / 2**30
        self.logger.scalars(scalars, iteration)
        values = {f"Parameters/{name}": v for name, v in model.distributions().items()}
        activations = {f"Parameters/{name}": f for name, f in SHOWN_VALUES.items()}
        self.logger.histograms(values, iteration, activations)

    @torch.no_grad()
    def evaluate(self, iteration: int, images: ImageStore) -> None:
        """Measure held-out and training views, and picture some of them."""
        findings = view_findings.find(self._stage, self._scene, images.shown)
        self.logger.scalars({tag: value for tag, _, value in findings.values()}, iteration)
        for line in findings.lines(self._held_out_note):
            self._console.info(f"iteration {iteration}: {line}")
        advice = findings.advice()
        if advice is not None:
            problem, remedy = advice
            self._console.warn(f"iteration {iteration}: {problem}", remedy)
        self.figures = findings.record()
        self.health = findings.health()
        self._picture_worst(findings, images)
        self.held_out = findings.whole_and_counted()
        means = self._picture_views(iteration, images)
        self.logger.scalars({f"View/{name}": value for name, value in means.items()}, iteration)
        for name, value in means.items():
            self._console.info(f"iteration {iteration}: {name} {value:.4f}")

    def _picture_views(self, iteration: int, images: ImageStore) -> dict[str, float]:
        """Render some views; return the means of the stage's view metrics."""
        metrics: dict[str, list[float]] = {}
        self._pictures.clear()
        for camera in self._pictured:
            output = self._stage.render(camera, geometry=True)
            pictures = view_pictures.view_pictures(output, outlined(images.shown(camera)))
            pictures |= self._stage.view_maps(camera)
            by_tag = {f"{camera.name}/{name}": picture for name, picture in pictures.items()}
            self.logger.images(by_tag, iteration)
            self._pictures.append(pictures)
            for name, value in self._stage.view_metrics(camera, output).items():
                metrics.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in metrics.items()}

    def write_pictures(self, folder: Path) -> None:
        """Write the pictures of the last evaluation as one PNG, and those that fit worst."""
        if self._worst:
            view_pictures.write_contact_sheet(folder / view_findings.WORST_FILE, self._worst)
        if self._pictures:
            path = folder / "views.png"
            view_pictures.write_contact_sheet(path, self._pictures)
            self._console.info(f"photograph, render, depth and normals: {path}")

    def results(self) -> dict[str, Any]:
        """Return the last evaluation's findings for the record of the run, without empty ones."""
        results = {"figures": self.figures, "held_out": self.held_out, "health": self.health}
        return {name: values for name, values in results.items() if values}

    def summary(self) -> dict[str, Any]:
        """Seconds and peak bytes of each phase, earlier processes included."""
        self._leave_phase()
        return self._phases

    def _picture_worst(self, findings: view_findings.Findings, images: ImageStore) -> None:
        """Picture the photographs that fit worst, beside their renders."""
        scene = self._scene
        cameras = {c.name: c for c in scene.cameras}
        self._worst.clear()
        for score in findings.worst():
            camera = cameras[score.name]
            photograph = outlined(images.shown(camera))
            render = to_uint8(self._stage.render(camera, geometry=False).image)
            self._worst.append(
                {
                    "photograph": view_pictures.thumbnail(photograph.cpu()),
                    "render": view_pictures.thumbnail(render.cpu()),
                }
            )

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
