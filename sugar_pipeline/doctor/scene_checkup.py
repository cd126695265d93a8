# SPDX-License-Identifier: Apache-2.0
"""What the doctor says about a scene and the Gaussians of its checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import image_size
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.data.visual_hull import hull_of
from gaussian_splatting.engine.memory_plan import surveyed
from gaussian_splatting.rasterization import project
from sugar_pipeline.doctor.findings import Finding
from sugar_trainers.coarse_run import CoarseOptions
from sugar_trainers.stage_memory import predict_coarse
from sugar_utils.errors import UserError
from sugar_utils.memory import format_bytes
from sugar_utils.neighbors import nearest_neighbors

FEW_VIEWS, FEW_POINTS = 20, 100
LARGE_SHARE_OF_EXTENT, SMALL_SHARE_OF_EXTENT = 0.5, 1e-7
MANY = 0.05
"""Share of Gaussians from which something is worth a warning."""

PERCENTILES = (1, 50, 99)
_NAMED = f"(percentiles {', '.join(map(str, PERCENTILES))})"


def scene_findings(scene: Scene) -> list[Finding]:
    """Cameras, photographs and points."""
    return [*_cameras(scene), *_photographs(scene), *_masks(scene), *_points(scene)]


def gaussian_findings(cloud: GaussianCloud, scene: Scene) -> list[Finding]:
    """Size, shape and opacity of Gaussians, duplicates, and who sees them.

    Args:
        cloud: N Gaussians, N at least 1.
        scene: Where they live.
    """
    return [
        Finding("Gaussians", f"{len(cloud):,}"),
        *_sizes(cloud, scene.extent),
        *_opacities(cloud),
        _duplicates(cloud.means),
        *_visibility(cloud, scene.train_cameras),
    ]


def memory_finding(cloud: GaussianCloud, options: CoarseOptions, scene: Scene) -> Finding:
    """What coarse training would need, and with which plan."""
    try:
        chosen = predict_coarse(cloud, options.config, options.memory, scene)
    except UserError as error:
        return Finding("memory of coarse training", "does not fit", "problem", str(error))
    if chosen is None:
        return Finding("memory of coarse training", "the system does not say what is free")
    most = max(needs.total for needs in chosen.phases.values())
    return Finding(
        "memory of coarse training", f"{format_bytes(most)} at most; {chosen.lines()[0]}"
    )


def _percentiles(values: Tensor) -> str:
    found = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return ", ".join(f"{value:.3g}" for value in found)


def _cameras(scene: Scene) -> Iterator[Finding]:
    n = len(scene.train_cameras)
    yield Finding.unless(
        n < FEW_VIEWS,
        "cameras",
        f"{n} to train on, {len(scene.test_cameras)} held out",
        "warning",
        f"fewer than {FEW_VIEWS} views seldom determine a surface; take more",
    )
    yield Finding.unless(
        scene.extent <= 0,
        "camera extent",
        f"{scene.extent:.3g} world units",
        "problem",
        "all cameras stand in one place; take photographs from different positions",
    )


def _photographs(scene: Scene) -> Iterator[Finding]:
    cameras = [*scene.train_cameras, *scene.test_cameras]
    sizes = Counter((camera.width, camera.height) for camera in cameras)
    shown = ", ".join(f"{n} of {w} x {h}" for (w, h), n in sizes.most_common(3))
    more = f" and {len(sizes) - 3} other sizes" if len(sizes) > 3 else ""
    n_bytes = sum((3 + (c.mask is not None)) * c.width * c.height for c in cameras)
    yield Finding("training size", f"{shown}{more}; {format_bytes(n_bytes)} as bytes")
    broken = [camera.name for camera in cameras if not _opens(camera)]
    yield Finding.unless(
        bool(broken),
        "photographs",
        f"{len(broken)} of {len(cameras)} cannot be opened" if broken else "all can be opened",
        "problem",
        f"copy them again: {', '.join(broken[:5])}",
    )


def _masks(scene: Scene) -> Iterator[Finding]:
    """What the masks of training views leave; nothing where there are none."""
    masked = [camera for camera in scene.train_cameras if camera.mask is not None]
    if not masked:
        return
    mode = masked[0].mask.mode
    share = np.mean([overview(camera).mean() / 255 for camera in masked])
    n = len(scene.train_cameras)
    yield Finding.unless(
        len(masked) < n,
        "masks",
        f"{len(masked)} of {n}, mode {mode}; {share:.0%} of their pixels count",
        "warning",
        "photographs without a mask count whole; make the others, or --masks none",
    )
    hull = hull_of(scene.train_cameras)
    if hull is not None and len(scene.points):
        n_inside = int(hull.contains(torch.from_numpy(scene.points)).sum())
        yield Finding.unless(
            n_inside == 0,
            "points inside of the masks",
            f"{n_inside:,} of {len(scene.points):,}",
            "problem",
            "do the masks belong to these photographs? Else --mask_mode ignore or --masks none",
        )


def _opens(camera: Camera) -> bool:
    """Whether the file of a photograph begins as an image does; nothing is decoded."""
    try:
        return camera.image_path is not None and image_size(camera.image_path)[0] > 0
    except UserError:
        return False


def _points(scene: Scene) -> Iterator[Finding]:
    n = len(scene.points)
    yield Finding.unless(
        n < FEW_POINTS,
        "points of the reconstruction",
        f"{n:,}",
        "warning",
        "vanilla training starts from them; let COLMAP triangulate again",
    )
    if n > 1:
        found = nearest_neighbors(torch.from_numpy(scene.points), 2)
        yield Finding(
            "distance of neighbouring points",
            f"{_percentiles(found.sq_distances[:, 1].sqrt())} world units {_NAMED}",
        )


def _sizes(cloud: GaussianCloud, extent: float) -> Iterator[Finding]:
    scales = cloud.log_scales.exp()
    longest, shortest = scales.amax(dim=1), scales.amin(dim=1)
    yield Finding(
        "longest axes",
        f"{_percentiles(longest.cpu())} world units {_NAMED}, "
        f"shortest {_percentiles(shortest.cpu())}",
    )
    finite = torch.stack([t.flatten(1).isfinite().all(dim=1) for t in cloud.tensors().values()])
    bad = int((~finite.all(dim=0)).sum())
    yield Finding.unless(
        bad > 0,
        "not finite",
        f"{bad:,} Gaussians",
        "problem",
        "the checkpoint is damaged or its training diverged; train it again",
    )
    huge = float((longest > LARGE_SHARE_OF_EXTENT * extent).float().mean())
    point = float((longest < SMALL_SHARE_OF_EXTENT * extent).float().mean())
    yield Finding.unless(
        huge > MANY or point > MANY,
        "degenerate",
        f"{huge:.2%} longer than {LARGE_SHARE_OF_EXTENT:g} extents, {point:.2%} shorter than "
        f"{SMALL_SHARE_OF_EXTENT:g}",
        "warning",
        "scene and checkpoint may differ in scale, or its training diverged",
    )


def _opacities(cloud: GaussianCloud) -> Iterator[Finding]:
    faint = float((cloud.opacity_logits < 0).float().mean())
    yield Finding.unless(
        faint > 1 - MANY,
        "opacity below 0.5",
        f"{faint:.1%} now; what stays so until iteration 9000 is removed",
        "warning",
        "nearly everything is transparent; train the vanilla stage for longer",
    )


def _duplicates(means: Tensor) -> Finding:
    unique = torch.unique(means, dim=0).shape[0]
    share = 1.0 - unique / means.shape[0]
    return Finding.unless(
        share > MANY,
        "duplicates",
        f"{share:.2%} share their position with another",
        "warning",
        "the file may hold the scene twice",
    )


def _visibility(cloud: GaussianCloud, cameras: Sequence[Camera]) -> Iterator[Finding]:
    with torch.no_grad():
        gaussians = cloud.activate()
        counts = [int((project(gaussians, camera).radii > 0).sum()) for camera in surveyed(cameras)]
    yield Finding.unless(
        min(counts) == 0,
        "visible",
        f"{min(counts):,} to {max(counts):,} Gaussians in {len(counts)} of the views",
        "warning" if max(counts) else "problem",
        "Gaussians and cameras live in different worlds: was the checkpoint trained on this scene?",
    )
