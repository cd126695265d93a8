# SPDX-License-Identifier: Apache-2.0
"""Textures from images: sharp, without seams, without moving things.

A first texture is the mean of all views, weighted by how finely they show the surface. Then each
photograph is brought into agreement with it, and what its render lacks of the photograph is added.
That makes the render as sharp as the photographs, which interpolation and the mean had blurred
(back-projection: Irani and Peleg, "Improving resolution by image registration", 1991). Weights are
interpolated between vertices: they are continuous, without seams.

Cameras and meshes are never exact, so photographs of one place differ by some pixels. Each one is
moved by the optical flow between it and the render of the texture (Lucas and Kanade, 1981, in a
pyramid). What differs even so is no part of the surface and counts little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import eroded, sampled_at, window_sums
from gaussian_splatting.losses.exposure import gain_of_means
from sugar_extractors.photographs import Photograph
from sugar_extractors.texture.texture_baking import BakedTexture, Baker, ViewColors
from sugar_scene.mesh_files.tangent_space import vertex_normals
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_rasterizer import pixels_of_points, rasterize_triangles, to_camera

FLOW_WINDOW = 6  # radius in pixels of the windows that move together
LEVELS = 3
STEPS = 3
LARGE = 1200  # pixels along the longest side
STIFFNESS = 2e-4  # squared gradients, below which a window does not move
MAX_SHIFT = 0.01  # of the longest side
OUTLIER = 3.0  # residuals of so many times the usual one count half
MIN_ERROR = 0.02
MIN_AGREEMENT = 1e-5  # of what differs, for places that nothing else shows
OUTLIER_COLOR = 0.25  # differences of colour that say nothing about the exposure
SHARP = 0.9  # gradient energy to that of a photograph, from which only low frequencies are added
WINDOW = 8  # radius in pixels of the windows whose means are those
LEAST_SHARE = 0.2  # of the best resolution, from which a view counts more than others
BORDER = 0.03  # of the longest side: there a view fades out


def smoothed(planes: Tensor, radius: int) -> Tensor:
    """Return means over windows of (2 radius + 1)^2 pixels, twice. (C, H, W) -> (C, H, W)"""
    for dim in (1, 2, 1, 2):
        size = planes.shape[dim]
        total = window_sums(planes, radius, dim)
        place = torch.arange(size, device=planes.device)
        end = (place + radius + 1).clamp_max(size)
        begin = (place - radius).clamp_min(0)
        count = end - begin
        planes = total / (count[:, None] if dim == 1 else count)
    return planes


def moved_by(planes: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
    """Read each pixel from where the flow points. (C, H, W), (2, H, W) in pixels -> (C, H, W)"""
    _, height, width = planes.shape
    y = torch.arange(height, device=planes.device) + 0.5
    x = torch.arange(width, device=planes.device) + 0.5
    return sampled_at(planes, x + flow[0], y[:, None] + flow[1], mode)


def optical_flow(image: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """Return where each pixel of the target is in the image, as an offset. (2, H, W) pixels

    Args:
        image: (C, H, W) in [0, 1]
        target: (C, H, W) in [0, 1]
        inside: How much each pixel counts. (H, W) in [0, 1]
    """
    pyramid = [_Level(image, target, inside[None])]
    while len(pyramid) < LEVELS and min(pyramid[-1].size) >= 8 * FLOW_WINDOW:
        pyramid.append(pyramid[-1].halved())
    flow = torch.zeros(2, *pyramid[-1].size, device=image.device)
    for level in reversed(pyramid):
        size = level.size
        if flow.shape[1:] != size:
            flow = 2 * functional.interpolate(flow[None], size, mode="bilinear")[0]
        # The finest level of a large image would take most of the time and add little.
        n_steps = STEPS if max(size) <= LARGE else 0
        for _ in range(n_steps):
            flow = flow + _flow_step(level, flow)
        flow = smoothed(flow, FLOW_WINDOW // 2)
    limit = MAX_SHIFT * max(flow.shape[1:])
    return flow * (limit / flow.norm(dim=0).clamp_min(limit))


class _Level(NamedTuple):
    """One level of the pyramid of :func:`optical_flow`."""

    image: Tensor  # (C, H, W)
    target: Tensor  # (C, H, W)
    inside: Tensor  # (1, H, W)

    @property
    def size(self) -> torch.Size:
        """Height and width in pixels."""
        return self.image.shape[1:]

    def halved(self) -> _Level:
        """Return the next level, of half the size."""
        return _Level(*(functional.avg_pool2d(planes[None], 2)[0] for planes in self))


def _flow_step(level: _Level, flow: Tensor) -> Tensor:
    """Return a step of Gauss-Newton, of at most a pixel, that brings the image to the target.

    (2, H, W) -> (2, H, W)
    """
    moved = moved_by(level.image, flow)
    gy, gx = torch.gradient(moved, dim=(1, 2))
    error = moved - level.target
    products = torch.stack([gx * gx, gx * gy, gy * gy, gx * error, gy * error])
    products = products.sum(dim=1) * level.inside
    xx, xy, yy, xe, ye = smoothed(products, FLOW_WINDOW)
    xx = xx + STIFFNESS
    yy = yy + STIFFNESS
    determinant = xx * yy - xy * xy
    step = torch.stack([xy * ye - yy * xe, xy * xe - xx * ye]) / determinant
    return step.clamp(-1, 1)


def aligned(image: Tensor, target: Tensor, covered: Tensor, gain: Tensor) -> Tensor:
    """Return an image aligned with a render, and low weights where they still differ.

    Args:
        image: Colours and how much each pixel counts. (4, H, W) in [0, 1]
        target: The render. (3, H, W) in [0, 1]
        covered: Its pixels that show the surface. (H, W) bool
        gain: That of :func:`gain_between`. (3, 1, 1)
    """
    colors, weight = image.split([3, 1])
    inside = weight[0] * covered
    grey = (colors * gain).mean(dim=0, keepdim=True)
    target_grey = target.mean(dim=0, keepdim=True)
    flow = optical_flow(grey, target_grey, inside)
    # Bilinear twice would blur. Bicubic reads two pixels around, of which all have to count.
    colors = moved_by(colors, flow, "bicubic").clamp(0, 1)
    least_weight = -functional.max_pool2d(-weight, kernel_size=5, stride=1, padding=2)
    weight = moved_by(least_weight, flow)
    agreement = _agreement(colors * gain, target, inside).clamp_min(MIN_AGREEMENT)
    return torch.cat([colors, weight * agreement])


def gain_between(image: Tensor, target: Tensor, covered: Tensor) -> Tensor:
    """Return the gain per channel that brings an image to a render. (3, 1, 1)

    Args:
        image: Colours and how much each pixel counts. (4, H, W) in [0, 1]
        target: The render. (3, H, W) in [0, 1]
        covered: Its pixels that show the surface. (H, W) bool
    """
    colors, weight = image.split([3, 1])
    is_similar = (colors - target).abs().amax(dim=0) < OUTLIER_COLOR
    return gain_of_means(colors, target, weight * covered * is_similar)


def _agreement(colors: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """Return how well colours agree with a target: 1 where they are equal, down to 0. (H, W)"""
    error = (colors - target).square().mean(dim=0)
    error, counts = smoothed(torch.stack([error * inside, inside]), 2)
    error = error / counts.clamp_min(1e-6)
    inside_error = error[inside > 0]
    usual_error = MIN_ERROR**2
    if inside_error.numel():
        usual_error = inside_error.median().clamp_min(MIN_ERROR**2)
    return 1 / (1 + (error / (OUTLIER**2 * usual_error)).square())


@dataclass(frozen=True)
class Resolution:
    """Resolution at which views show the vertices of a mesh."""

    vertices: Tensor  # (V, 3) world units
    faces: Tensor  # (F, 3)
    normals: Tensor  # (V, 3)
    best: Tensor  # pixels per squared world unit in the best view; 0 where none shows it, (V,)

    @classmethod
    def of(cls, vertices: Tensor, faces: Tensor, cameras: Sequence[Camera]) -> Resolution:
        """Return the resolution at vertices, (V, 3), of faces, (F, 3), in the best of all views."""
        normals = vertex_normals(vertices, faces)
        resolution = cls(vertices, faces, normals, torch.zeros_like(vertices[:, 0]))
        best = resolution.best
        for camera in cameras:
            torch.maximum(best, resolution.in_view(camera), out=best)
        return resolution

    def in_view(self, camera: Camera) -> Tensor:
        """Return pixels per squared world unit; 0 where something hides the vertex. (V,)"""
        pixels = pixels_of_points(self.vertices, self.vertices, self.faces, camera)
        is_visible, row, column = pixels
        points = to_camera(self.vertices, camera)
        rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=points.device)
        directions = functional.normalize(points, dim=1)
        cosine = -(self.normals @ rotation.T * directions).sum(dim=1)
        to_sides = [column, camera.width - 1 - column, row, camera.height - 1 - row]
        border = BORDER * camera.longest_side
        fade = (torch.stack(to_sides).amin(dim=0) / border).clamp(0, 1)
        pixels_per_area = camera.fx * camera.fy / points[:, 2].square()
        return torch.where(is_visible, cosine.clamp_min(0) * fade * pixels_per_area, 0.0)

    def preferred(self, camera: Camera) -> Tensor:
        """Return how much more a view counts: 1 where it is the best, falling to 0. (V,)

        It is 0 below ``LEAST_SHARE`` of the best resolution.
        """
        share = self.in_view(camera) / self.best.clamp_min(1e-30)
        return ((share - LEAST_SHARE) / (1 - LEAST_SHARE)).clamp_min(0).square()


@torch.no_grad()
def bake_photographs(
    baker: Baker,
    photograph: Photograph,
    face_colors: Tensor,
    resolution: Resolution,
) -> BakedTexture:
    """Colour a mesh from images.

    Args:
        photograph: Returns the colours of a view, and how much each pixel counts. (H, W, 4) in
            [0, 1]
        face_colors: For faces that no view shows. (F, 3) in [0, 1]
        resolution: Of the vertices of the baker's mesh.
    """

    def mean_colors(camera: Camera) -> ViewColors:
        return ViewColors(photograph(camera), resolution.preferred(camera))

    def progress(n_passes_before: int, done: int, total: int) -> None:
        baker.on_view(n_passes_before * total + done, 2 * total)

    first_pass = replace(baker, on_view=partial(progress, 0))
    baked = first_pass.bake(mean_colors, face_colors)
    mesh = TexturedMesh(baker.vertices, baker.faces, baker.atlas.uvs, baked.texture)
    details = _MissingDetails(mesh, photograph, resolution)
    second_pass = replace(baker, on_view=partial(progress, 1))
    texture = second_pass.add(baked.texture, details.of_view, details.median_gain)
    return replace(baked, texture=texture)


class _MissingDetails:
    """Source of views for the second pass: differences between each image and the render.

    It also records the gain of each image, whose median is the exposure of the texture.
    """

    def __init__(self, mesh: TexturedMesh, photograph: Photograph, resolution: Resolution) -> None:
        self._mesh = mesh
        self._photograph = photograph
        self._resolution = resolution
        self._gains: dict[str, Tensor] = {}  # by the name of the camera, (3, 1, 1)

    def of_view(self, camera: Camera) -> ViewColors:
        """Return the missing colours of a view, and how much each pixel counts. (H, W, 4)"""
        mesh = self._mesh
        target = render_textured(mesh, camera, supersampling=2).permute(2, 0, 1)
        covered = rasterize_triangles(mesh.vertices, mesh.faces, camera).covered
        image = self._photograph(camera).permute(2, 0, 1)
        gain = gain_between(image, target, covered)
        self._gains[camera.name] = gain
        colors, weight = aligned(image, target, covered, gain).split([3, 1])
        colors = colors * gain
        # A pixel on the outline is not of the surface alone.
        weight = weight * eroded(covered, 1)
        missing = colors - target
        if _gradient_energy(target, weight) > SHARP * _gradient_energy(colors, weight):
            # More would be sharper than the photographs where mesh and cameras are not exact.
            sums = smoothed(missing * weight, WINDOW)
            missing = sums / smoothed(weight, WINDOW).clamp_min(1e-6)
        else:
            # Reading a texture blurs it, so its finest details have to be stronger.
            missing = 2 * missing - smoothed(missing, 1)
        weighted = torch.cat([missing, weight]).permute(1, 2, 0)
        return ViewColors(weighted, self._resolution.preferred(camera))

    def median_gain(self) -> Tensor:
        """Return the gain of the median image, whichever views resolve most. (3,)"""
        gains = torch.stack(list(self._gains.values()))
        return gains.median(dim=0).values.flatten()


def _gradient_energy(image: Tensor, weight: Tensor) -> float:
    """Return the weighted sum of squared differences of neighbours. (3, H, W), (1, H, W)"""
    across = (image[:, :, 1:] - image[:, :, :-1]).square() * weight[:, :, 1:]
    down = (image[:, 1:] - image[:, :-1]).square() * weight[:, 1:]
    return float(across.sum() + down.sum())
