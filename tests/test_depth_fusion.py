# SPDX-License-Identifier: Apache-2.0
"""Fusion of depth maps of a known surface: between pixels, at edges of what a view shows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import pixel_rays
from sugar_extractors.mesh.fusion.tsdf import Fusion, TsdfConfig
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Box
from sugar_utils.console import Console
from tests.support.mesh_scenes import cameras_around

RADIUS = 0.8


def ellipsoid_view(camera, half_axes=(RADIUS, RADIUS, RADIUS)):
    """Exact depth of an ellipsoid around the origin at the middles of pixels, 0 beside it."""
    rays = pixel_rays(camera, dtype=torch.float64, device=torch.device("cpu"))
    # In axes where the ellipsoid is a unit sphere.
    scale = torch.tensor(half_axes, dtype=torch.float64)
    ways = rays @ torch.from_numpy(camera.rotation) / scale
    start = torch.from_numpy(camera.center) / scale
    squared_lengths = (ways**2).sum(dim=-1)
    along = -(ways @ start)
    squared_start = (start**2).sum()
    root = along**2 - squared_lengths * (squared_start - 1)
    depth = (along - root.clamp_min(0).sqrt()) / squared_lengths
    depth = torch.where(root > 0, depth, 0.0).float()
    ones = torch.ones_like(depth)
    return DepthView(camera, depth, ones[..., None].expand(-1, -1, 3), ones)


def fused(voxel: float, cameras, render=ellipsoid_view, **settings):
    config = TsdfConfig(**{"tsdf_voxel_size": voxel, "min_component": 10, **settings})
    box = Box.cube(np.zeros(3), 1.2)
    return Fusion(render, cameras, box, config, Console()).surface().mesh


def test_depth_is_interpolated_between_pixels():
    """The depth of the nearest pixel, off by half a pixel times the slope, has an error of 0.07."""
    camera = cameras_around(1)[0]
    pixel = 3.5 / 96
    mesh = fused(0.75 * pixel, [camera])
    radii = np.linalg.norm(mesh.vertices, axis=1)
    toward_camera = mesh.vertices @ camera.center / (radii * np.linalg.norm(camera.center))
    errors = (radii - RADIUS)[toward_camera > 0.6]
    assert len(errors) > 300
    assert np.abs(errors).mean() < 0.015 * pixel


@pytest.mark.parametrize("voxel", [0.02, 0.05])
def test_silhouettes_leave_no_sheets_between_the_object_and_what_is_behind(voxel):
    mesh = fused(voxel, cameras_around(14))
    radii = np.linalg.norm(mesh.vertices, axis=1)
    assert np.abs(radii - RADIUS).max() < 1.5 * voxel


@pytest.mark.parametrize("thickness", [1.2, 2.0])
def test_views_from_behind_do_not_thicken_what_is_thin(thickness):
    """A mean of all views alone makes the disc thicker by half a voxel on each side."""
    voxel = 0.02
    half_axes = (RADIUS, RADIUS, thickness / 2 * voxel)
    mesh = fused(voxel, cameras_around(24), partial(ellipsoid_view, half_axes=half_axes))
    distances = np.linalg.norm(mesh.vertices[:, :2], axis=1)
    is_central = distances < 0.3 * RADIUS
    heights = mesh.vertices[is_central, 2] / voxel
    for side in (1, -1):
        on_side = side * heights
        on_side = on_side[on_side > 0]
        assert len(on_side) > 300
        errors = on_side - thickness / 2
        assert np.abs(errors).mean() < 0.3


def test_pieces_of_thin_parts_stay_and_specks_of_as_few_triangles_go():
    rod = partial(ellipsoid_view, half_axes=(0.05, 0.05, 0.25))
    speck = partial(ellipsoid_view, half_axes=(0.04, 0.04, 0.04))
    cameras = cameras_around(14)
    pieces = fused(0.05, cameras, rod, min_component=500, tsdf_depth="plane")
    assert 0 < pieces.n_faces < 500
    assert np.ptp(pieces.vertices[:, 2]) > 0.45
    assert fused(0.05, cameras, speck).n_faces > 0
    assert fused(0.05, cameras, speck, min_component=500, tsdf_depth="plane").n_faces == 0
    # Blended depth has floaters of that size.
    assert fused(0.05, cameras, rod, min_component=500).n_faces == 0
