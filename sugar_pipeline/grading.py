# SPDX-License-Identifier: Apache-2.0
"""How good the results of a pipeline are, in a word and a reason, from figures of their views.

A grade is about what a stage made; that of the whole is the worst of what is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.components.view_checks import smaller
from gaussian_splatting.data.cameras import Camera, pixels_of
from gaussian_splatting.engine.reporting.evaluation import psnr
from gaussian_splatting.engine.reporting.health import problem_of
from gaussian_splatting.engine.reporting.view_findings import LARGE_GAP, constant_psnr
from gaussian_splatting.engine.training_views import is_counted
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_mesh import TriangleMesh, border_edges
from sugar_scene.triangle_rasterizer import rasterize_triangles

Word = Literal["good", "usable", "poor"]
WORDS: tuple[Word, ...] = ("good", "usable", "poor")  # from best to worst

GOOD_PSNR = 23.0  # of held-out views, over the pixels that count, in dB
USABLE_PSNR = 18.0  # below, shapes are recognised and little else
TRAINING_BONUS = 2.0  # dB by which views that were trained on are better
TEXTURE_MALUS = 3.0  # dB by which a mesh without view-dependent colour is worse
GOOD_HOLES = 0.01  # share of holes in what a mesh covers of the views
USABLE_HOLES = 0.05
GOOD_IOU = 0.9  # intersection over union with the object masks
USABLE_IOU = 0.75
MAX_LOSS = 1.0  # dB by which a refinement may be worse than the model it began with
N_VIEWS = 8  # views on which a mesh is measured
_MIN_PIXELS = 50
_EDGE_SAMPLES = 8  # points along an open edge that are projected
_RIM_PIXELS = 2  # a rim may be so far from the border of its hole in the image
_RIM_SHARE = 0.5  # of the border of a hole that has to be a rim


class Grade(NamedTuple):
    """A word for the quality and the figure, or figures, that it comes from."""

    word: Word
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def worst(grades: Sequence[Grade]) -> Grade | None:
    """The grade with the worst word; the first of several. None where there is none."""
    return max(grades, key=lambda one: WORDS.index(one.word), default=None)


def grade_model(health: Mapping[str, Any], held_out: bool) -> Grade | None:
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
    grades = [_by_psnr(value, 0.0 if held_out else TRAINING_BONUS, _views(held_out))]
    gap = health.get("gap")
    if gap is not None and gap >= LARGE_GAP:
        reason = f"views that were trained on are {gap:.1f} dB better than held-out ones"
        grades.append(Grade("usable", reason))
    return worst(grades)


def grade_mesh(figures: Mapping[str, Any]) -> Grade | None:
    """Grade a mesh by :func:`mesh_health`; None where nothing was measured."""
    problem = problem_of(figures)
    if problem is not None:
        return Grade("poor", problem)
    grades = []
    iou = figures.get("mask_iou")
    if iou is not None:
        words = f"the mesh fills the masks to {iou:.0%} (intersection over union)"
        grades.append(Grade(_word(iou, GOOD_IOU, USABLE_IOU), words))
    holes = figures.get("hole_share")
    if holes is not None:
        words = f"holes are {holes:.1%} of what the views show of the mesh"
        grades.append(Grade(_word(-holes, -GOOD_HOLES, -USABLE_HOLES), words))
    value = figures.get("psnr")
    if value is not None:
        grades.append(_by_psnr(value, -TEXTURE_MALUS, "the textured mesh against photographs"))
    return worst(grades)


def loses(refined: Mapping[str, Any], coarse: Mapping[str, Any]) -> float:
    """Decibels by which the views of a refined model are worse than the coarse model's."""
    if "psnr" not in refined or "psnr" not in coarse:
        return 0.0
    return max(0.0, coarse["psnr"] - refined["psnr"])


def mesh_health(
    mesh: TriangleMesh | TexturedMesh,
    cameras: Sequence[Camera],
    load_image: Callable[[Camera], Tensor],
) -> dict[str, float]:
    """Coverage of some views, and of a textured mesh the colour error there.

    Returns:
        ``mask_iou`` where there are object masks, else ``covered_share``; ``hole_share``, pixels
        enclosed by what the mesh covers over covered pixels; of a textured mesh also ``psnr`` and
        ``constant_psnr`` of the covered pixels.
    """
    chosen = cameras[:: -(-len(cameras) // N_VIEWS)]
    vertices = torch.as_tensor(mesh.vertices, dtype=torch.float32, device="cpu")
    faces = torch.as_tensor(mesh.faces, device="cpu")
    textured = mesh.to("cpu") if isinstance(mesh, TexturedMesh) else None
    figures: dict[str, list[float]] = {}
    shape = TriangleMesh(vertices.numpy(), faces.numpy(), np.zeros((len(vertices), 3), np.uint8))
    rims = vertices[torch.from_numpy(border_edges(shape))]
    n_holes = n_covered = 0
    for camera in chosen:
        view, image = smaller(camera, load_image(camera).cpu())
        covered = rasterize_triangles(vertices, faces, view).covered
        mask = is_counted(image) if camera.shows_object else None
        n_holes += int(holes_in(covered, pixels_of_edges(rims, view), mask).sum())
        n_covered += int(covered.sum())
        if mask is None:
            figures.setdefault("covered_share", []).append(float(covered.float().mean()))
        else:
            union = max(1, int((covered | mask).sum()))
            figures.setdefault("mask_iou", []).append(int((covered & mask).sum()) / union)
            covered = covered & mask
        if textured is not None and int(covered.sum()) >= _MIN_PIXELS:
            colors = render_textured(textured, view)
            target = image[..., :3].float() / 255
            value = min(psnr(colors, target, covered.double()), 100.0)
            figures.setdefault("psnr", []).append(value)
            figures.setdefault("constant_psnr", []).append(constant_psnr(image[..., :3], covered))
    means = {name: round(sum(values) / len(values), 4) for name, values in figures.items()}
    return {**means, "hole_share": round(n_holes / max(1, n_covered), 4)}


def pixels_of_edges(ends: Tensor, camera: Camera) -> Tensor:
    """Pixels that edges cross, hidden ones included. (E, 2, 3) world units -> (H, W) bool"""
    shares = torch.linspace(0, 1, _EDGE_SAMPLES, dtype=ends.dtype, device="cpu")[:, None, None]
    points = (ends[:, 0] + shares * (ends[:, 1] - ends[:, 0]).unsqueeze(0)).reshape(-1, 3)
    rotation = torch.as_tensor(camera.rotation, dtype=ends.dtype, device="cpu")
    shift = torch.as_tensor(camera.translation, dtype=ends.dtype, device="cpu")
    pixels = pixels_of(points @ rotation.T + shift, camera)
    crossed = torch.zeros(camera.height, camera.width, dtype=torch.bool, device="cpu")
    crossed[pixels.rows[pixels.inside], pixels.columns[pixels.inside]] = True
    return crossed


def holes_in(covered: Tensor, rims: Tensor, mask: Tensor | None) -> Tensor:
    """Pixels inside of holes of a mesh. (H, W) bool

    The mesh does not cover them, although it does all around them, and most of what is around them
    is its own rim: an opening between two arms has none.

    Args:
        covered: Pixels that show the mesh. (H, W) bool
        rims: Pixels that open edges of the mesh cross. (H, W) bool
        mask: Pixels of the object; a hole outside of them is one of the object. None: unknown
    """
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import binary_dilation, binary_fill_holes, label

    gaps = binary_fill_holes(covered.numpy()) & ~covered.numpy()
    near_rims = binary_dilation(rims.numpy(), np.ones((3, 3)), iterations=_RIM_PIXELS)
    holes = np.zeros_like(gaps)
    parts, n_parts = label(gaps)
    for number in range(1, n_parts + 1):
        part = parts == number
        around = binary_dilation(part) & ~part
        if near_rims[around].mean() >= _RIM_SHARE:
            holes |= part
    found = torch.from_numpy(holes)
    return found if mask is None else found & mask


def _by_psnr(value: float, shift: float, views: str) -> Grade:
    word = _word(value, GOOD_PSNR + shift, USABLE_PSNR + shift)
    return Grade(word, f"{views} {value:.1f} dB")


def _views(held_out: bool) -> str:
    return "held-out views" if held_out else "training views"


def _word(value: float, good: float, usable: float) -> Word:
    if value >= good:
        return "good"
    return "usable" if value >= usable else "poor"
