# SPDX-License-Identifier: Apache-2.0
"""What a model is worth at one moment of a run: figures and pictures of its views."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.engine.component import Figure
from gaussian_splatting.engine.reporting import evaluation
from gaussian_splatting.engine.reporting.evaluation import EvaluationResult, ViewScore, psnr
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization import RenderOutput
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path

FITTED = "PSNR after gain and offset"
POSED = "PSNR after fitted poses"
N_TRAINING_VIEWS = 8
N_WORST = 3
LARGE_GAP = 5.0
"""Decibels by which training views may be better; well covered captures stay below four."""

SOLID = 0.5  # opacity from which a pixel is covered
MANY_FLOATERS = 0.02  # share of held-out pixels; with a sky sphere it is well below

FARTHEST_SHARE = 0.98  # of all pixels, that are nearer than what is drawn white
NEAR_SHARE = 0.25
FAR_BEHIND = 3.0
"""White in any case is so many times the depth that this share of the pixels is nearer than."""
THUMBNAIL = 240  # longest side in pixels
WORST_FILE = "worst.png"
_SAMPLED_PIXELS = 1_000_000
FOG_MARGIN = 0.1  # share of the nearest observed point's depth that a pixel must be in front of it
MIN_GAIN = -2.0
"""Decibels that a model must have beyond one constant colour for each image. Objects of nearly one
colour behind imprecise masks come close to it, and failures lie far below."""
MIN_MASK_IOU = 0.6
"""Least intersection over union of rendered opacity, or of a mesh, with the masks."""
MAX_GAP = 12.0  # decibels by which training views may be better than held-out ones
MIN_COVERED = 0.02  # least share of the images that a mesh covers where there are no masks
_POSES = "sugar doctor, or python train.py --doctor, with -s SCENE checks them"


@dataclass(frozen=True)
class Findings:
    """What one evaluation found; None where it does not apply."""

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
        """Figures that tell whether the run failed, as of :func:`problem_of`."""
        values = {
            "psnr": self.counted_psnr,
            "constant_psnr": self.constant_psnr,
            "mask_iou": self.mask_iou,
            "gap": self.gap,
        }
        return {n: round(v, 4) for n, v in values.items() if v is not None and math.isfinite(v)}

    @property
    def gap(self) -> float | None:
        """Decibels by which training views are better than held-out ones."""
        if self.held_out is None or self.training is None:
            return None
        return _decibels(self.training) - _decibels(self.posed or self.held_out)

    def worst(self) -> list[ViewScore]:
        """The photographs that fit worst, of those that were measured; the worst one first."""
        scores = [s for found in (self.held_out, self.training) if found for s in found.per_view]
        return sorted(scores, key=lambda score: (_decibels(score), score.name))[:N_WORST]

    def values(self) -> list[tuple[str, str, float]]:
        rows: list[tuple[str, str, float | None]] = []
        for tag, role, found in (
            ("Test", "held-out", self.held_out),
            ("Training", "training", self.training),
        ):
            if found is not None:
                rows += [
                    (f"{tag}/L1", f"{role} L1", found.l1),
                    (f"{tag}/PSNR", f"{role} PSNR", found.psnr),
                    (f"{tag}/{FITTED}", f"{role} {FITTED}", found.fitted_psnr),
                    (f"{tag}/SSIM", f"{role} SSIM", found.ssim),
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
        # JSON has no infinity, which is the PSNR of equal images.
        finite = {name: value for _, name, value in self.values() if math.isfinite(value)}
        worst = {s.name: round(_decibels(s), 2) for s in self.worst() if math.isfinite(s.psnr)}
        return {**finite, "worst photographs": worst}

    def lines(self, note: str) -> list[str]:
        """Lines for the console; ``note`` says what held-out figures must be read with."""
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
        whole = {"psnr": self.held_out.psnr, "ssim": self.held_out.ssim}
        return {"whole": whole, "counted": self.held_out.counted}

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
def find(
    stage: Stage,
    test_cameras: Sequence[Camera],
    train_cameras: Sequence[Camera],
    load_image: Callable[[Camera], Tensor],
    observations: Observations | None = None,
    dropped_cameras: Sequence[Camera] = (),
) -> Findings:
    """Measure a model.

    Renders are rounded to 8 bits, so that the figures are those of images saved and measured by
    any other program.
    """
    seen_of: dict[str, list[float]] = defaultdict(list)  # by field of Findings

    def render(camera: Camera) -> Tensor:
        return stage.render(camera, geometry=False).image

    def render_and_look(camera: Camera) -> Tensor:
        known = test_cameras and observations is not None
        seen = observations.seen(camera) if known else None
        output = stage.render(camera, geometry=seen is not None)
        if seen is not None:
            nearest = float(seen.depths.min())
            seen_of["floaters"].append(fog_share(output.depth, output.alpha, nearest))
        photograph = load_image(camera).cpu()
        counted = is_counted(photograph)
        if counted is None or bool(counted.any()):
            weights = None if counted is None else counted.double()
            image = output.image.detach().cpu()
            value = min(100.0, psnr(image, photograph[..., :3], weights))
            seen_of["counted_psnr"].append(value)
            seen_of["constant_psnr"].append(constant_psnr(photograph[..., :3], counted))
        if counted is not None and camera.shows_object:
            solid = output.alpha.detach().cpu() >= SOLID
            either = int((solid | counted).sum())
            seen_of["mask_iou"].append(int((solid & counted).sum()) / max(1, either))
        return output.image

    def score(cameras: Sequence[Camera], renderer: Callable = render) -> EvaluationResult | None:
        if not cameras:
            return None
        fitted = any(component.changes_exposure for component in stage.components)
        return evaluation.evaluate(renderer, cameras, load_image, quantise=True, fitted=fitted)

    held_out = score(test_cameras, render_and_look)
    posed = None
    if any(component.fits_held_out_poses for component in stage.components):
        posed = score([stage.fitted_pose(camera, load_image(camera)) for camera in test_cameras])
    with_dropped = score(dropped_cameras)
    if with_dropped is not None:
        rest = held_out.per_view if held_out else ()
        with_dropped = EvaluationResult((*rest, *with_dropped.per_view))
    n = len(train_cameras)
    shown = min(n, N_TRAINING_VIEWS)
    chosen = [train_cameras[i * n // shown] for i in range(shown)]
    training = score(chosen, render if test_cameras else render_and_look)
    figures = [figure for component in stage.components for figure in component.figures()]
    summaries = [component.summary() for component in stage.components]
    means = {name: sum(values) / len(values) for name, values in seen_of.items()}
    return Findings(
        held_out,
        training,
        component_figures=tuple(figures),
        summaries=tuple(line for line in summaries if line is not None),
        posed=posed,
        with_dropped=with_dropped,
        **means,
    )


def constant_psnr(photograph: Tensor, counted: Tensor | None = None) -> float:
    """PSNR of the best image of one colour for (H, W, 3) uint8, in dB; at most 100."""
    pixels = photograph.reshape(-1, 3) if counted is None else photograph[counted]
    variance = float(pixels.double().div(255).var(dim=0, correction=0).mean())
    return 100.0 if variance < 1e-10 else -10 * math.log10(variance)


def _decibels(score: ViewScore | EvaluationResult) -> float:
    """PSNR; after gain and offset where exposures are not expected to agree."""
    return score.psnr if score.fitted_psnr is None else score.fitted_psnr


def _scores(result: EvaluationResult) -> str:
    fitted = "" if result.fitted_psnr is None else f"{FITTED} {result.fitted_psnr:.2f} dB, "
    return f"PSNR {result.psnr:.2f} dB, {fitted}SSIM {result.ssim:.4f}, L1 {result.l1:.4f}"


LIVE_PICTURES: dict[str, Callable[[RenderOutput], Tensor]] = {
    "image": lambda output: evaluation.to_uint8(output.image),
    "depth": lambda output: depth_picture(output.depth, farthest(output.depth)),
    "normal": lambda output: normal_picture(output.normal),
    "alpha": lambda output: grey_picture(output.alpha),
}
"""What can be shown of a render. (H, W, 3) uint8"""


def view_pictures(output: RenderOutput, photograph: Tensor) -> dict[str, Tensor]:
    """Photograph, render, depth and normals of a view. (H, W, 3) uint8 each, on the CPU"""
    kinds = {"render": "image", "depth": "depth", "normal": "normal"}
    made = {name: LIVE_PICTURES[kind](output).cpu() for name, kind in kinds.items()}
    return {"photograph": photograph.cpu(), **made}


def grey_picture(values: Tensor) -> Tensor:
    """Values in [0, 1] from black to white. (H, W) -> (H, W, 3) uint8"""
    return evaluation.to_uint8(values[..., None].expand(-1, -1, 3))


def depth_picture(depth: Tensor, far: Tensor | float) -> Tensor:
    """Depth as grey: white is far, or where there is nothing. (H, W) -> (H, W, 3) uint8"""
    return grey_picture(depth / far)


def normal_picture(normal: Tensor) -> Tensor:
    """Normals in camera axes as colours: x right red, y up green, towards the camera blue."""
    return evaluation.to_uint8((normal * normal.new_tensor([1.0, -1.0, -1.0]) + 1) / 2)


def farthest(depth: Tensor) -> Tensor:
    """Depth that is drawn white: nearly the largest, but not far behind what is near."""
    values = depth.flatten()
    values = values[:: max(1, values.numel() // _SAMPLED_PIXELS)]
    values = values[(values > 0) & values.isfinite()]
    if values.numel() == 0:
        return depth.new_ones(())
    ranks = (max(1, round(share * values.numel())) for share in (NEAR_SHARE, FARTHEST_SHARE))
    near, far = (values.kthvalue(rank).values for rank in ranks)
    return torch.minimum(far, FAR_BEHIND * near)


def thumbnail(picture: Tensor) -> Tensor:
    """A picture with no side above ``THUMBNAIL``. (H, W, 3) uint8 -> (h, w, 3) uint8"""
    small = Image.fromarray(picture.numpy())
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return torch.from_numpy(np.array(small))


def write_contact_sheet(path: Path, views: Sequence[dict[str, Tensor]]) -> None:
    rows = [torch.cat(list(pictures.values()), dim=1) for pictures in views]
    width = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in rows]
    with atomic_path(path) as temporary:
        Image.fromarray(torch.cat(padded).numpy()).save(temporary)


def fog_share(depth: Tensor, alpha: Tensor, nearest: float) -> float:
    """Share of the pixels that lie in front of all observed points, by more than a margin.

    Args:
        depth: Blended depth, not divided by alpha. (H, W) world units
        alpha: Accumulated opacity. (H, W)
        nearest: Depth of the nearest observed point, world units.
    """
    solid = alpha > SOLID
    in_front = depth < (1.0 - FOG_MARGIN) * nearest * alpha
    return float((solid & in_front).to(torch.float64).mean())


class FailedResult(UserError):
    """A stage finished, but its result is not usable; the next stages would waste their time."""

    exit_code = 5
    label = "failed"


def problem_of(figures: Mapping[str, Any]) -> str | None:
    """What is wrong with a result, its likely cause and a remedy in one line; None for nothing.

    Args:
        figures: Any of ``psnr`` and ``constant_psnr`` (of the masked pixels where there are masks),
            ``gap``, ``mask_iou`` and ``covered_share``.
    """
    psnr = figures.get("psnr")
    constant = figures.get("constant_psnr")
    if psnr is not None and constant is not None and psnr < constant + MIN_GAIN:
        return (
            f"renders are worse than one constant colour for each image ({psnr:.1f} dB, constant "
            f"{constant:.1f} dB): poses or masks are wrong, or training was far too short; {_POSES}"
        )
    iou = figures.get("mask_iou")
    if iou is not None and iou < MIN_MASK_IOU:
        return (
            f"the result fills {iou:.0%} of the masks (IoU, at least {MIN_MASK_IOU:.0%} expected): "
            "masks contradict each other, or parts were removed by mistake; check the masks, or "
            "pass --mask_mode ignore"
        )
    gap = figures.get("gap")
    if gap is not None and gap > MAX_GAP:
        return (
            f"training views are {gap:.1f} dB better than held-out ones: each image is explained "
            f"by itself; {_POSES}"
        )
    covered = figures.get("covered_share")
    if covered is not None and covered < MIN_COVERED:
        return (
            f"the mesh covers {covered:.1%} of the images: the surface was not found; train "
            "longer, or lower --surface_level"
        )
    return None
