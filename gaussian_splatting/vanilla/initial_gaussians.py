# SPDX-License-Identifier: Apache-2.0
"""The Gaussians that the vanilla stage starts from: a PLY, or the points of a reconstruction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.sky_sphere import SKY_SHARE, opaque_sky, with_sky
from gaussian_splatting.core.cloud import MAX_SH_DEGREE, GaussianCloud
from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.data.scans.scan_files import MAX_SCAN_POINTS, Scan, is_scan
from gaussian_splatting.data.scans.scan_frame import ScanFrame, scan_in_scene, without_offset
from gaussian_splatting.formats import ply as ply_files
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.readers import read_gaussians
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_utils.device import float32_tensor
from sugar_utils.errors import Notify, UserError
from sugar_utils.neighbors import mean_sq_distance_to_nearest

INITIAL_OPACITY = 0.1
LEAST_SQ_DISTANCE = 1e-7  # between points, of 3DGS, in square world units
LEAST_SHARE = 1e-4  # the same as a share of the spread of all points, for captures in large units


def initial_cloud(points: Tensor, colors: Tensor) -> GaussianCloud:
    """Make Gaussians from points, (N, 3) in world units, and their colours, (N, 3) uint8.

    Isotropic, as large as the root mean squared distance to the three nearest other points.

    Raises:
        UserError: There are no points, or some are not finite.
    """
    n = points.shape[0]
    if n == 0:
        raise UserError(
            "the scene has no 3D points to start from; reconstruct it again with COLMAP so that "
            "it has points, or pass a point cloud with --init_ply"
        )
    if not torch.isfinite(points).all():
        raise UserError("the scene's 3D points have non-finite coordinates; remove those points")
    least = LEAST_SQ_DISTANCE
    spread = float(points.float().std(dim=0).norm()) if n > 1 else 0.0
    if spread > 0:
        least = min(least, (LEAST_SHARE * spread) ** 2)
    distance = mean_sq_distance_to_nearest(points).clamp_min(least).sqrt()
    quats = points.new_zeros(n, 4)
    quats[:, 0] = 1.0
    logit = torch.logit(points.new_tensor(INITIAL_OPACITY))
    return GaussianCloud(
        means=points.float(),
        sh_dc=rgb_to_sh(colors.float() / 255.0)[:, None, :],
        sh_rest=points.new_zeros(n, (MAX_SH_DEGREE + 1) ** 2 - 1, 3),
        quats=quats,
        opacity_logits=logit.expand(n, 1).clone(),
        log_scales=distance.log()[:, None].expand(n, 3).clone(),
    )


def initial_gaussians(
    scene: Scene,
    init_ply: Path | None,
    config: VanillaConfig,
    region: Region,
    device: torch.device,
    notify: Notify,
) -> GaussianCloud:
    """Make the Gaussians to start from; never more than the settings allow.

    Args:
        init_ply: Gaussians, coloured points or a scan to start from; None for the scene's points.
        region: Only what lies in its hull is taken; a sky is added around it.
    """
    limit = config.densification.max_gaussians
    hull = region.hull
    if init_ply is not None and holds_gaussians(init_ply):
        cloud = read_gaussians(init_ply, notify, scene.offset)
        cloud = cloud.select(_carved(cloud.means, hull, notify))
        return cloud.select(_thinned(len(cloud), limit, notify)).to(device)
    points = torch.from_numpy(scene.points)
    colors = torch.from_numpy(scene.points_rgb)
    if init_ply is not None and is_scan(init_ply):
        scan = _scan_of(scene, init_ply, limit, notify)
        points = float32_tensor(scan.positions)
        colors = torch.from_numpy(scan.colors)
    elif init_ply is not None:
        ply_points, ply_colors = _points_in_scene(init_ply, scene, notify)
        points = torch.from_numpy(ply_points)
        colors = torch.from_numpy(ply_colors)
    # Chosen before the sizes are: those fill the gaps between the points that stay.
    inside = _carved(points, hull, notify)
    points = points[inside]
    colors = colors[inside]
    # Far outside of an object there is nothing.
    robustness = config.robustness
    if limit is not None:
        # So small a sky that most of the Gaussians allowed are left.
        n_sky_points = min(robustness.sky_points, int(SKY_SHARE * limit))
        robustness = replace(robustness, sky_points=n_sky_points)
    n_sky = robustness.sky_points if region.sky is not None and hull is None else 0
    rows = _thinned(len(points), limit, notify, n_sky)
    points = points[rows]
    colors = colors[rows]
    if hull is not None:
        return initial_cloud(points.to(device), colors.to(device))
    points, colors = with_sky(points, colors, scene.train_cameras, scene.extent, robustness)
    return opaque_sky(initial_cloud(points.to(device), colors.to(device)), region.sky)


def _points_in_scene(path: Path, scene: Scene, notify: Notify) -> tuple[np.ndarray, np.ndarray]:
    """Read points from where their record says that they stand. (N, 3) float32, (N, 3) uint8"""
    placement = Placement.of(path)
    offset = placement.offset if placement.is_recorded else scene.offset
    points, colors = ply_files.read_point_ply(path, notify, offset)
    points = moved_points(points.astype(np.float64), placement.to_scene(scene.offset))
    return points.astype(np.float32), colors


def holds_gaussians(path: Path) -> bool:
    """Whether a file to start from holds Gaussians, as opposed to points or a scan."""
    return not is_scan(path) and ply_files.holds_gaussians(path)


def _scan_of(scene: Scene, path: Path, limit: int | None, notify: Notify) -> Scan:
    """Return the points of a scan near the cameras, few enough to start from."""
    frame = ScanFrame.of(scene.calibrated_cameras, scene.points)
    most = MAX_SCAN_POINTS if limit is None else min(limit, MAX_SCAN_POINTS)
    return scan_in_scene(path, frame, most, notify, without_offset(scene.offset))


def _carved(points: torch.Tensor, hull: VisualHull | None, notify: Notify) -> torch.Tensor:
    """Rows to start from: those inside of the masks' hull. (N, 3) -> (M,)"""
    if hull is None or len(points) == 0:
        return torch.arange(len(points), device="cpu")
    device = hull.distances[0].device
    rows = hull.contains(points.to(device)).cpu().nonzero()[:, 0]
    notify(f"starting from the {len(rows):,} of {len(points):,} points inside of the masks")
    if len(rows) == 0:
        raise UserError(
            f"none of the {len(points):,} points to start from lies inside of the masks; check "
            "that they belong to these photographs, or pass --mask_mode ignore or --masks none"
        )
    return rows


def _thinned(n: int, limit: int | None, notify: Notify, n_besides: int = 0) -> torch.Tensor:
    """Rows to start from: all, or evenly spaced ones where there are more than allowed."""
    if limit is None or n + n_besides <= limit:
        return torch.arange(n, device="cpu")
    n_points = limit - n_besides
    notify(f"--max_gaussians {limit}: starting from {n_points} of {n} points")
    return torch.linspace(0, n - 1, n_points, dtype=torch.float64, device="cpu").long()
