# SPDX-License-Identifier: Apache-2.0
"""Recorded values of the original method, on a device (tests/data/golden/README.md).

Inputs and tolerances are those of the tests, which run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck, equal
from gaussian_splatting.engine.trainable import GROUP_NAMES
from gaussian_splatting.rasterization import rasterize
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.refine_stage import RefineStage
from tests.support.golden import golden_cameras, golden_cloud

Case = dict[str, np.ndarray]
LIMITS = {"vertices": 1e-5, "opacity_logits": 1e-3, "log_scales": 5e-4, "sh_dc": 1e-4}
"""Difference allowed on 99 % of the entries after twelve iterations of the refinement."""

REFINE_NAMES = {
    "vertices": "vertices",
    "opacity_logits": "all_densities",
    "log_scales": "scales",
    "sh_dc": "sh_coordinates_dc",
}
TRAJECTORY_LIMITS = {
    "points": (2e-6, 1e-5, 1e-4),
    "all_densities": (2e-4, 4e-3, 5e-2),
    "scales": (2e-5, 3e-4, 3e-3),
    "quaternions": (5e-6, 5e-5, 5e-4),
    "sh_coordinates_dc": (5e-6, 1e-4, 1e-3),
    "sh_coordinates_rest": (5e-7, 1e-5, 1e-4),
}
"""Median, 90 % and 99 % of the difference allowed after twenty iterations."""


def _load(setup: Setup, name: str) -> Case:
    path = setup.golden_folder / f"{name}.npz"
    if not path.is_file():
        raise SkipCheck(f"there is no {path}; --golden names the folder")
    with np.load(path) as archive:
        return {key: archive[key] for key in archive.files}


def _within(what: str, found: Any, expected: Any, limit: float) -> Finding:
    """A number, or the largest difference of an array."""
    error = float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())
    return Finding(
        what, error <= limit, f"off by {error:.1e}, allowed {limit:.0e}", {"error": error}
    )


def _gradient(what: str, found: Tensor, expected: np.ndarray, limit: float = 1e-3) -> Finding:
    """Largest error beside the largest entry, and the cosine."""
    a, b = found.cpu().numpy().ravel().astype(np.float64), expected.ravel().astype(np.float64)
    error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
    cosine = a @ b / max(np.sqrt((a @ a) * (b @ b)), 1e-30)
    ok = error <= limit and (cosine > 0.9999 or not b.any())
    return Finding(what, bool(ok), f"error {error:.1e}, allowed {limit:.0e}, cosine {cosine:.6f}")


class _RecordedDraws:
    """A sample source that returns recorded draws, sorted as the kernels want them."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, mask: Tensor, n: int, iteration: int) -> tuple[Tensor, Tensor]:
        indices, noise = self._case["in_sample_gaussian_idx"], self._case["in_sample_noise"]
        if indices.ndim == 2:
            row = int(np.flatnonzero(self._case["in_iterations"] == iteration)[0])
            indices, noise = indices[row], noise[row]
        order = np.argsort(indices, kind="stable")
        return (
            torch.tensor(indices[order].astype(np.int64)).to(mask.device),
            torch.tensor(noise[order]).to(mask.device),
        )


def _coarse(setup: Setup, case: Case, mode: str) -> CoarseStage:
    cloud = golden_cloud(case).detached().to(setup.place)
    config = CoarseConfig(regularization_type=mode, sdf_samples=1)
    return CoarseStage(
        cloud, config, float(case["in_E"]), lambda message: None, _RecordedDraws(case)
    )


def _target(setup: Setup, case: Case, index: int) -> Tensor:
    if "in_gt_image" in case:
        return torch.tensor(case["in_gt_image"]).to(setup.place)
    from PIL import Image

    folder = setup.golden_folder / "case10_checkpoint_A" / "images"
    pixels = np.asarray(Image.open(folder / f"view_{index:03d}.png").convert("RGB"))
    return (torch.tensor(pixels).float() / 255).to(setup.place)


def rendering(setup: Setup) -> Iterator[Finding]:
    """Images and gradients of all recorded degrees and backgrounds."""
    case = _load(setup, "case02_raster_A")
    cameras = golden_cameras(case)
    for key in (k.removeprefix("out_rgb_") for k in case if k.startswith("out_rgb_")):
        camera_name, degree, background = key.split("_")
        camera = cameras[int(camera_name[3:])]
        cloud = golden_cloud(case).to(setup.place)
        leaves = [t.requires_grad_() for t in cloud.tensors().values()]
        color = torch.ones(3, device=setup.place) if background == "white" else None
        output = rasterize(cloud.activate(), camera, color, sh_degree=int(degree[3:]))
        error = np.abs(output.image.detach().cpu().numpy() - case[f"out_rgb_{key}"])
        typical = float(np.quantile(error, 0.995))
        ok = error.mean() < 1e-5 and typical < 1e-4 and error.max() < 6e-3
        shown = f"mean {error.mean():.1e}, 99.5 % {typical:.1e}, largest {error.max():.1e}"
        yield Finding(f"{key}, image", bool(ok), shown)
        yield equal(f"{key}, radii", output.radii, torch.tensor(case[f"out_radii_{camera_name}"]))
        if f"grad_{key}_points" not in case:
            continue
        (output.image * torch.tensor(case["in_weights"]).to(setup.place)).sum().backward()
        for name, leaf in zip(cloud.tensors(), leaves, strict=True):
            expected = case[f"grad_{key}_{GROUP_NAMES[name]}"]
            yield _gradient(f"{key}, gradient of {name}", leaf.grad, expected, 2e-3)


def _iteration(setup: Setup, name: str, mode: str, terms: dict[str, tuple[str, float]],
               gradient: str | None) -> Iterator[Finding]:  # fmt: skip
    """One recorded iteration of the coarse stage."""
    case = _load(setup, name)
    if mode == "sdf":
        # Colours are those of the same scene in another file.
        colored = _load(setup, "case02_raster_A")
        case |= {key: colored[key] for key in colored if key.startswith("in_sh_")}
    stage = _coarse(setup, case, mode)
    index, iteration = int(case["in_camera_index"]), int(case["in_iteration"])
    stage.begin(iteration)
    result = stage.accumulate(iteration, golden_cameras(case)[index], _target(setup, case, index))
    if "out_knn_idx" in case and stage.neighbors is not None:
        yield equal("neighbours", stage.neighbors, torch.tensor(case["out_knn_idx"]))
    for term, (recorded, limit) in terms.items():
        expected = float(case[f"out_{recorded}"])
        yield _within(term, float(result.terms[term]), expected, limit * max(1.0, abs(expected)))
    for own, grad in stage.model.optimizer.gradients().items() if gradient else ():
        key = f"{gradient}_{GROUP_NAMES[own]}"
        if key in case:
            yield _gradient(f"gradient of {own}", grad, case[key])


def dn_iteration(setup: Setup) -> Iterator[Finding]:
    """Depth-normal consistency."""
    terms = {"density": ("density_loss", 1e-5), "normal": ("normal_loss", 1e-5),
             "dn": ("dn_loss", 1e-4), "color": ("color_loss", 1e-4),
             "loss": ("total_loss", 1e-4)}  # fmt: skip
    yield from _iteration(
        setup, "case05b_density_terms_A", "dn_consistency", terms, "grad_total_loss"
    )


def sdf_iteration(setup: Setup) -> Iterator[Finding]:
    """The sdf regularisation."""
    terms = {"sdf": ("sdf_loss", 1e-4), "normal": ("normal_loss", 1e-5),
             "color": ("color_loss", 1e-4), "loss": ("total_loss", 1e-4)}  # fmt: skip
    yield from _iteration(setup, "case05c_sdf_terms_A", "sdf", terms, None)


def entropy_iteration(setup: Setup) -> Iterator[Finding]:
    """Before the prune."""
    terms = {"entropy": ("entropy", 1e-5), "color": ("color_loss", 1e-5),
             "loss": ("total_loss", 1e-5)}  # fmt: skip
    yield from _iteration(
        setup, "case06_losses_lr_prune_A", "dn_consistency", terms, "grad_total_loss"
    )


def trajectory(setup: Setup) -> Iterator[Finding]:
    """Twenty iterations of the coarse stage."""
    case = _load(setup, "case09_trajectory_A")
    stage, cameras, worst = _coarse(setup, case, "dn_consistency"), golden_cameras(case), 0.0
    for row, iteration in enumerate(int(i) for i in case["in_iterations"]):
        index = int(case["in_camera_order"][row])
        target = (torch.tensor(case["in_gt_images_u8"][index]).float() / 255).to(setup.place)
        stage.begin(iteration)
        if row == 0:
            yield equal("neighbours", stage.neighbors, torch.tensor(case["out_knn_idx"]))
        result = stage.accumulate(iteration, cameras[index], target)
        for term, recorded in (("loss", "total"), ("color", "color"), ("dn", "dn"),
                               ("density", "density"), ("normal", "normal")):  # fmt: skip
            difference = float(result.terms[term]) - float(case[f"out_{recorded}_loss"][row])
            worst = max(worst, abs(difference))
        stage.apply(iteration)
    yield _within("terms of 20 iterations", worst, 0.0, 1e-4)
    for own, name in GROUP_NAMES.items():
        found = stage.model.optimizer.parameters[own].detach().cpu().numpy()
        first = np.abs(case[f"grad_first_{name}"])
        error = np.abs(found - case[f"out_final_{name}"])[first > 1e-6 * first.max()]
        quantiles = np.quantile(error, (0.5, 0.9, 0.99))
        shown = ", ".join(f"{q:.1e}" for q in quantiles) + " at 50, 90, 99 %"
        yield Finding(own, bool((quantiles <= TRAJECTORY_LIMITS[name]).all()), shown)


def refinement(setup: Setup) -> Iterator[Finding]:
    """Twelve iterations of mesh-bound Gaussians."""
    case = _load(setup, "case11_refine_trajectory_A")
    extent, per_triangle = float(case["in_E"]), int(case["in_gaussians_per_triangle"])
    mesh = (torch.tensor(case[f"in_{name}"]) for name in ("vertices", "faces", "vertex_colors"))
    cloud = bind_to_mesh(*(t.to(setup.place) for t in mesh), per_triangle, extent)
    config = RefineConfig(
        gaussians_per_triangle=per_triangle,
        n_vertices_in_fg=int(case["in_n_vertices_in_fg"]),
        normal_consistency_factor=float(case["in_normal_consistency_factor"]),
    )
    stage, cameras, worst = RefineStage(cloud, config, extent), golden_cameras(case), 0.0
    for row, index in enumerate(case["in_camera_order"]):
        stage.begin(row + 1)
        target = (torch.tensor(case["in_gt_images_u8"][index]).float() / 255).to(setup.place)
        terms = stage.accumulate(row + 1, cameras[index], target).terms
        worst = max(worst, abs(float(terms["loss"]) - float(case["out_total_loss"][row])))
        stage.apply(row + 1)
    yield _within("loss of 12 iterations", worst, 0.0, 1e-5)
    for own, limit in LIMITS.items():
        found = stage.model.optimizer.parameters[own].detach().cpu().numpy()
        error = float(np.quantile(np.abs(found - case[f"out_final_{REFINE_NAMES[own]}"]), 0.99))
        yield _within(f"{own}, 99 % of the entries", error, 0.0, limit)


CHECKS = (
    Check("rendering", rendering, 60),
    Check("dn_consistency", dn_iteration, 60),
    Check("sdf", sdf_iteration, 60),
    Check("entropy", entropy_iteration, 60),
    Check("trajectory", trajectory, 60),
    Check("refinement", refinement, 60),
)
