# SPDX-License-Identifier: Apache-2.0
"""Figures of a model at one point of a run: quality of its views, floaters, masks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.engine.component import Figure
from gaussian_splatting.engine.reporting.evaluation import (
    EvaluationResult,
    ImageComparison,
    ViewScore,
    intersection_over_union,
    score_views,
)
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.scenes.scene import Scene

FITTED = "PSNR after gain and offset"
POSED = "PSNR after fitted poses"
N_TRAINING_VIEWS = 8
N_WORST = 3
LARGE_GAP = 5.0
"""Decibels by which training views may be better; well covered captures stay below four."""
SOLID = 0.5  # opacity from which a pixel is covered
MANY_FLOATERS = 0.02  # share of held-out pixels; with a sky sphere it is well below
WORST_FILE = "worst.png"
FLOATER_MARGIN = 0.1
"""Share of the nearest observed point's depth that a pixel of a floater is in front of it."""


@dataclass(frozen=True)
class Findings:
    """Findings of one evaluation; None where one does not apply."""

    held_out: EvaluationResult | None
    training: EvaluationResult | None = None
    # Share of held-out pixels in front of every point that their photograph observes.
    floaters: float | None = None
    # Numbers of the stage's components, and a line about each.
    component_figures: tuple[Figure, ...] = ()
    summaries: tuple[str, ...] = ()
    # Held-out views, each from the pose in which it fits best.
    posed: EvaluationResult | None = None
    # Held-out views with those that contradict the rest.
    with_dropped: EvaluationResult | None = None
    # Intersection over union of the rendered opacity with the object masks of the measured views.
    mask_iou: float | None = None
    counted_psnr: float | None = None
    constant_psnr: float | None = None

    def health(self) -> dict[str, float]:
        """Figures for the health check of the run, see :func:`problem_of`."""
        values = {
            "psnr": self.counted_psnr,
            "constant_psnr": self.constant_psnr,
            "mask_iou": self.mask_iou,
            "gap": self.gap,
        }
        return {n: round(v, 4) for n, v in values.items() if v is not None and math.isfinite(v)}

    @property
    def gap(self) -> float | None:
        """Difference between the PSNR of training views and of held-out views, dB."""
        if self.held_out is None or self.training is None:
            return None
        return _decibels(self.training) - _decibels(self.posed or self.held_out)

    def worst(self) -> list[ViewScore]:
        """The photographs that fit worst, of those that were measured; the worst one first."""
        scores = []
        for result in (self.held_out, self.training):
            if result is not None:
                scores += result.per_view
        return sorted(scores, key=lambda score: (_decibels(score), score.name))[:N_WORST]

    def values(self) -> list[tuple[str, str, float]]:
        """Tag of the curve, name in the record, and value of every figure that there is."""
        rows: list[tuple[str, str, float | None]] = []
        for tag, role, result in (
            ("Test", "held-out", self.held_out),
            ("Training", "training", self.training),
        ):
            if result is not None:
                rows += [
                    (f"{tag}/L1", f"{role} L1", result.l1),
                    (f"{tag}/PSNR", f"{role} PSNR", result.psnr),
                    (f"{tag}/{FITTED}", f"{role} {FITTED}", result.fitted_psnr),
                    (f"{tag}/SSIM", f"{role} SSIM", result.ssim),
                ]
        if self.posed is not None:
            rows.append((f"Test/{POSED}", f"held-out {POSED}", _decibels(self.posed)))
        counted = {} if self.held_out is None else self.held_out.counted
        for name, value in counted.items():
            rows.append((f"Test/{name.upper()}_counted", f"held-out {name} in masks", value))
        if self.with_dropped is not None:
            what = "held-out PSNR with dropped views"
            rows.append(("Test/PSNR_with_dropped", what, self.with_dropped.psnr))
        rows.append(("Test/floaters", "floater share", self.floaters))
        for figure in self.component_figures:
            rows.append((figure.tag, figure.tag.partition("/")[2], figure.value))
        return [(tag, name, value) for tag, name, value in rows if value is not None]

    def record(self) -> dict[str, Any]:
        """All figures by name, for ``run.json``."""
        # JSON has no infinity, which is the PSNR of equal images.
        finite = {name: value for _, name, value in self.values() if math.isfinite(value)}
        worst = {s.name: round(_decibels(s), 2) for s in self.worst() if math.isfinite(s.psnr)}
        return {**finite, "worst photographs": worst}

    def lines(self, note: str) -> list[str]:
        """Lines for the console; ``note`` qualifies held-out figures."""
        lines = []
        if self.held_out is not None:
            n = len(self.held_out.per_view)
            counted = self.held_out.counted
            lines.append(f"{n} held-out views{note}, {_scores(self.held_out)}")
            if counted:
                lines.append(
                    f"of these only what the masks count, PSNR {counted['psnr']:.2f} dB, SSIM "
                    f"{counted['ssim']:.4f}"
                )
        if self.with_dropped is not None:
            n = len(self.with_dropped.per_view)
            scores = _scores(self.with_dropped)
            lines.append(f"{n} held-out views with those that contradict the rest, {scores}")
        if self.posed is not None:
            lines.append(f"of these in the poses that fit best, {_scores(self.posed)}")
        if self.training is not None:
            lines.append(f"{len(self.training.per_view)} training views, {_scores(self.training)}")
        if self.floaters is not None:
            lines.append(
                f"floaters: {self.floaters:.2%} of the held-out pixels lie in front of all that "
                "their photograph observed"
            )
        lines.extend(self.summaries)
        return lines

    def whole_and_counted(self) -> dict[str, dict[str, float]]:
        """Held-out figures over whole views and over what masks count; empty without masks."""
        if self.held_out is None or not self.held_out.counted:
            return {}
        of_whole_views = {"psnr": self.held_out.psnr, "ssim": self.held_out.ssim}
        return {"whole": of_whole_views, "counted": self.held_out.counted}

    def advice(self) -> tuple[str, str] | None:
        """A line about a large gap, and one about what helps; None where there is no such gap."""
        gap = self.gap
        if gap is None or gap < LARGE_GAP:
            return None
        robust = "--robust in the vanilla stage, " if (self.floaters or 0.0) > MANY_FLOATERS else ""
        return (
            f"training views are {gap:.1f} dB better than held-out ones: the model explains each "
            "photograph by itself",
            f"{robust}more photographs, --masks, --exposure_compensation or better poses",
        )


@torch.no_grad()
def find(stage: Stage, scene: Scene, load_image: LoadImage) -> Findings:
    """Measure a model on the held-out views of a scene, and on some training views.

    Renders are rounded to 8 bits, so that the figures are those of images saved and measured by
    any other program.
    """
    measurement = _Measurement(stage, scene, load_image)
    held_out = measurement.score(scene.test_cameras, measurement.render_and_look)
    posed = None
    if stage.fits_held_out_poses:
        moved = [stage.fitted_pose(camera, load_image(camera)) for camera in scene.test_cameras]
        posed = measurement.score(moved)
    with_dropped = measurement.score(scene.dropped_test_cameras)
    if with_dropped is not None:
        held_out_views = held_out.per_view if held_out else ()
        with_dropped = EvaluationResult((*held_out_views, *with_dropped.per_view))
    chosen = _evenly_chosen(scene.train_cameras, N_TRAINING_VIEWS)
    looks_at_training = not scene.test_cameras
    render = measurement.render_and_look if looks_at_training else measurement.render
    training = measurement.score(chosen, render)
    reports = [component.report() for component in stage.components]
    return Findings(
        held_out,
        training,
        component_figures=tuple(figure for report in reports for figure in report.figures),
        summaries=tuple(report.summary for report in reports if report.summary is not None),
        posed=posed,
        with_dropped=with_dropped,
        **measurement.means(),
    )


class _Measurement:
    """Renders views, and collects what is seen in them by field of :class:`Findings`."""

    def __init__(self, stage: Stage, scene: Scene, load_image: LoadImage) -> None:
        self._stage = stage
        self._scene = scene
        self._load_image = load_image
        self._values: dict[str, list[float]] = defaultdict(list)

    def score(
        self, cameras: Sequence[Camera], render: Callable[[Camera], Tensor] | None = None
    ) -> EvaluationResult | None:
        """Scores of views; None without views."""
        if not cameras:
            return None
        renderer = self.render if render is None else render
        fitted = self._stage.changes_exposure
        return score_views(renderer, cameras, self._load_image, quantise=True, fitted=fitted)

    def render(self, camera: Camera) -> Tensor:
        """Render a view. (H, W, 3)"""
        return self._stage.render(camera, geometry=False).image

    def render_and_look(self, camera: Camera) -> Tensor:
        """Render a view, and look for floaters, at its mask, and at what its mask counts."""
        nearest = self._nearest_observed_depth(camera)
        output = self._stage.render(camera, geometry=nearest is not None)
        if nearest is not None:
            share = floater_share(output.depth, output.alpha, nearest)
            self._values["floaters"].append(share)
        comparison = ImageComparison.of(camera, output.image.cpu(), self._load_image(camera))
        if comparison.n_pixels:
            self._values["counted_psnr"].append(comparison.psnr())
            self._values["constant_psnr"].append(comparison.constant_psnr())
        counted = comparison.counted
        if counted is not None and camera.shows_object:
            is_solid = output.alpha.detach().cpu() >= SOLID
            self._values["mask_iou"].append(intersection_over_union(is_solid, counted))
        return output.image

    def means(self) -> dict[str, float]:
        """Mean over the views that were looked at, by field of :class:`Findings`."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def _nearest_observed_depth(self, camera: Camera) -> float | None:
        """Depth of the nearest point that a held-out photograph observes, if any is known."""
        observations = self._scene.observations
        if not self._scene.test_cameras or observations is None:
            return None
        points = observations.seen(camera)
        return None if points is None else float(points.depths.min())


def _evenly_chosen(cameras: Sequence[Camera], most: int) -> list[Camera]:
    n_chosen = min(len(cameras), most)
    return [cameras[i * len(cameras) // n_chosen] for i in range(n_chosen)]


def _decibels(score: ViewScore | EvaluationResult) -> float:
    """PSNR; after gain and offset where exposures are not expected to agree."""
    return score.psnr if score.fitted_psnr is None else score.fitted_psnr


def _scores(result: EvaluationResult) -> str:
    fitted = "" if result.fitted_psnr is None else f"{FITTED} {result.fitted_psnr:.2f} dB, "
    return f"PSNR {result.psnr:.2f} dB, {fitted}SSIM {result.ssim:.4f}, L1 {result.l1:.4f}"


def floater_share(depth: Tensor, alpha: Tensor, nearest: float) -> float:
    """Share of the pixels that lie in front of all observed points, by more than a margin.

    Args:
        depth: Blended depth, not divided by alpha. (H, W) world units
        alpha: Accumulated opacity. (H, W)
        nearest: Depth of the nearest observed point, world units.
    """
    solid = alpha > SOLID
    in_front = depth < (1.0 - FLOATER_MARGIN) * nearest * alpha
    return float((solid & in_front).to(torch.float64).mean())
