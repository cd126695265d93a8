# SPDX-License-Identifier: Apache-2.0
"""Grades of a pipeline's results, a word and a reason each, from figures of their views.

A grade is about the result of one stage; that of a run is the worst of its final results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.subsets import at_most
from gaussian_splatting.data.cameras import Camera, LoadImage, pixels_of
from gaussian_splatting.engine.reporting.evaluation import ImageComparison, intersection_over_union
from gaussian_splatting.engine.reporting.health import problem_of
from gaussian_splatting.engine.reporting.view_findings import LARGE_GAP
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.engine.view_sampling import smaller
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_mesh import TriangleMesh, border_edges
from sugar_scene.triangle_rasterizer import rasterize_triangles

Word = Literal["good", "usable", "poor"]
WORDS: tuple[Word, ...] = ("good", "usable", "poor")  # from best to worst

GOOD_PSNR = 23.0  # dB of held-out views, over the pixels that count
USABLE_PSNR = 18.0  # below, shapes are recognised and little else
TRAINING_BONUS = 2.0  # dB by which views that were trained on are better
TEXTURE_MALUS = 3.0  # dB by which a mesh without view-dependent colour is worse
GOOD_HOLES = 0.01  # share of holes in what a mesh covers of the views
USABLE_HOLES = 0.05
GOOD_IOU = 0.9  # intersection over union with the object masks
USABLE_IOU = 0.75
MAX_LOSS = 1.0  # dB by which a refinement may be worse than the model it began with
N_VIEWS = 8  # views on which a mesh is measured
_SIDE = 240  # longest side in pixels of these views
_MIN_PIXELS = 50  # that a textured mesh covers of a view whose colours are compared
_EDGE_SAMPLES = 8  # points along an open edge that are projected
_RIM_PIXELS = 2  # a rim may be so far from the border of its hole in the image
_RIM_SHARE = 0.5  # of the border of a hole that has to be a rim


class Grade(NamedTuple):
    """A grade with the figures that it is based on."""

    word: Word
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def worst(grades: Sequence[Grade]) -> Grade | None:
    """Return the grade with the worst word; the first of several. None where there is none."""
    return max(grades, key=lambda grade: WORDS.index(grade.word), default=None)


def grade_model(health: Mapping[str, float], held_out: bool) -> Grade | None:
    """Grade trained Gaussians by their views; None where nothing was measured.

    Args:
        health: Of the run's record: ``psnr``, and ``gap``, ``mask_iou`` where they are known.
        held_out: Whether these are views that were not trained on.
    """
    problem = problem_of(health)
    if problem is not None:
        return Grade("poor", problem)
    value = health.get("psnr")
    if value is None:
        return None
    if held_out:
        grades = [_grade_of_psnr(value, 0.0, "held-out views")]
    else:
        grades = [_grade_of_psnr(value, TRAINING_BONUS, "training views")]
    gap = health.get("gap")
    if gap is not None and gap >= LARGE_GAP:
        reason = f"views that were trained on are {gap:.1f} dB better than held-out ones"
        grades.append(Grade("usable", reason))
    return worst(grades)


def grade_mesh(figures: Mapping[str, float]) -> Grade | None:
    """Grade a mesh by :func:`mesh_health`; None where nothing was measured."""
    problem = problem_of(figures)
    if problem is not None:
        return Grade("poor", problem)
    grades = []
    iou = figures.get("mask_iou")
    if iou is not None:
        reason = f"the mesh fills the masks to {iou:.0%} (intersection over union)"
        grades.append(Grade(_word(iou, GOOD_IOU, USABLE_IOU), reason))
    hole_share = figures.get("hole_share")
    if hole_share is not None:
        reason = f"holes are {hole_share:.1%} of what the views show of the mesh"
        grades.append(Grade(_word(-hole_share, -GOOD_HOLES, -USABLE_HOLES), reason))
    value = figures.get("psnr")
    if value is not None:
        views = "the textured mesh against photographs"
        grades.append(_grade_of_psnr(value, -TEXTURE_MALUS, views))
    return worst(grades)


def loses(refined: Mapping[str, float], coarse: Mapping[str, float]) -> float:
    """Drop of PSNR from the coarse to the refined model, dB."""
    if "psnr" not in refined or "psnr" not in coarse:
        return 0.0
    return max(0.0, coarse["psnr"] - refined["psnr"])


@dataclass
class _ViewFigures:
    """Figures of a mesh, collected view by view; averages at the end."""

    values: dict[str, list[float]] = field(default_factory=dict)  # of each view, by name
    n_hole_pixels: int = 0
    n_covered_pixels: int = 0

    def add(self, name: str, value: float) -> None:
        """Add the figure of one view."""
        self.values.setdefault(name, []).append(value)

    def add_coverage(self, covered: Tensor, mask: Tensor | None) -> None:
        """Add how much of a view, or of its object mask, the mesh covers. (H, W) bool"""
        if mask is None:
            self.add("covered_share", float(covered.float().mean()))
            return
        self.add("mask_iou", intersection_over_union(covered, mask))

    def add_colors(self, comparison: ImageComparison) -> None:
        """Add the colour error of a view, unless hardly any pixels are covered."""
        if comparison.n_pixels >= _MIN_PIXELS:
            self.add("psnr", comparison.psnr())
            self.add("constant_psnr", comparison.constant_psnr())

    def means(self) -> dict[str, float]:
        """Average figures over the views, rounded."""
        means = {name: round(sum(values) / len(values), 4) for name, values in self.values.items()}
        hole_share = self.n_hole_pixels / max(1, self.n_covered_pixels)
        return {**means, "hole_share": round(hole_share, 4)}


def mesh_health(
    mesh: TriangleMesh | TexturedMesh,
    cameras: Sequence[Camera],
    load_image: LoadImage,
) -> dict[str, float]:
    """Measure the coverage of some views, and the colour error of a textured mesh.

    Returns:
        ``mask_iou`` where there are object masks, else ``covered_share``; ``hole_share``, pixels
        enclosed by what the mesh covers over covered pixels; of a textured mesh also ``psnr`` and
        ``constant_psnr`` of the covered pixels.
    """
    vertices = torch.as_tensor(mesh.vertices, dtype=torch.float32, device="cpu")
    faces = torch.as_tensor(mesh.faces, device="cpu")
    textured = mesh.to("cpu") if isinstance(mesh, TexturedMesh) else None
    rims = vertices[torch.from_numpy(_rim_edges(vertices, faces))]
    figures = _ViewFigures()
    for camera in at_most(cameras, N_VIEWS):
        view, image = smaller(camera, load_image(camera), _SIDE)
        covered = rasterize_triangles(vertices, faces, view).covered
        mask = is_counted(image) if camera.shows_object else None
        holes = holes_in(covered, pixels_of_edges(rims, view), mask)
        figures.n_hole_pixels += int(holes.sum())
        figures.n_covered_pixels += int(covered.sum())
        figures.add_coverage(covered, mask)
        if textured is not None:
            figures.add_colors(
                ImageComparison.of(view, render_textured(textured, view), image, covered)
            )
    return figures.means()


def _rim_edges(vertices: Tensor, faces: Tensor) -> np.ndarray:
    """Open edges of a mesh, as rows of its vertices. (E, 2)"""
    no_colors = np.zeros((len(vertices), 3), np.uint8)
    return border_edges(TriangleMesh(vertices.numpy(), faces.numpy(), no_colors))


def pixels_of_edges(ends: Tensor, camera: Camera) -> Tensor:
    """Mark pixels that edges cross, hidden edges included. (E, 2, 3) world units -> (H, W) bool"""
    shares = torch.linspace(0, 1, _EDGE_SAMPLES, dtype=ends.dtype, device="cpu")[:, None, None]
    starts = ends[:, 0]
    steps = ends[:, 1] - ends[:, 0]
    points = (starts + shares * steps.unsqueeze(0)).reshape(-1, 3)
    pixels = pixels_of(camera.to_view(points), camera)
    rows = pixels.rows[pixels.inside]
    columns = pixels.columns[pixels.inside]
    crossed = torch.zeros(camera.height, camera.width, dtype=torch.bool, device="cpu")
    crossed[rows, columns] = True
    return crossed


def holes_in(covered: Tensor, rims: Tensor, mask: Tensor | None) -> Tensor:
    """Mark pixels inside of holes of a mesh. (H, W) bool

    A hole is an uncovered region that covered pixels enclose, and most of whose border is near
    open edges of the mesh: an opening between two arms has none.

    Args:
        covered: Pixels that show the mesh. (H, W) bool
        rims: Pixels that open edges of the mesh cross. (H, W) bool
        mask: Pixels of the object; a hole outside of them is one of the object. None: unknown
    """
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import binary_dilation, binary_fill_holes, label

    covered_array = covered.numpy()
    gaps = binary_fill_holes(covered_array) & ~covered_array
    square = np.ones((3, 3))
    is_near_rim = binary_dilation(rims.numpy(), square, iterations=_RIM_PIXELS)
    holes = np.zeros_like(gaps)
    labels = np.zeros(gaps.shape, np.int32)
    label(gaps, output=labels)
    for number in range(1, int(labels.max()) + 1):
        gap = labels == number
        border = binary_dilation(gap) & ~gap
        if is_near_rim[border].mean() >= _RIM_SHARE:
            holes |= gap
    hole_pixels = torch.from_numpy(holes)
    return hole_pixels if mask is None else hole_pixels & mask


def _grade_of_psnr(value: float, shift: float, views: str) -> Grade:
    word = _word(value, GOOD_PSNR + shift, USABLE_PSNR + shift)
    return Grade(word, f"{views} {value:.1f} dB")


def _word(value: float, good: float, usable: float) -> Word:
    if value >= good:
        return "good"
    return "usable" if value >= usable else "poor"
