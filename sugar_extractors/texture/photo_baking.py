# SPDX-License-Identifier: Apache-2.0
"""A texture of photographs: sharp, without seams, and without what is no part of the surface.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import eroded
from sugar_extractors.texture.tangent_space import vertex_normals
from sugar_extractors.texture.texture_baking import BakedTexture, Baker, ViewColors
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, render_textured
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
    """Means over windows, twice. (C, H, W) -> (C, H, W)"""
    for dim in (1, 2, 1, 2):
        size = planes.shape[dim]
        pad = (0, 0, radius, radius) if dim == 1 else (radius, radius)
        padded = functional.pad(planes, pad)
        # A sum of slices takes a quarter of the time of pooling on the CPU, and has the same bits.
        total = padded.narrow(dim, 0, size).clone()
        for start in range(1, 2 * radius + 1):
            total += padded.narrow(dim, start, size)
        at = torch.arange(size, device=planes.device)
        count = (at + radius + 1).clamp_max(size) - (at - radius).clamp_min(0)
        planes = total / (count[:, None] if dim == 1 else count)
    return planes


def moved_by(planes: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
    """Each pixel from where the flow points. (C, H, W), (2, H, W) in pixels -> (C, H, W)"""
    _, height, width = planes.shape
    y = torch.arange(height, device=planes.device) + 0.5
    x = torch.arange(width, device=planes.device) + 0.5
    at = torch.stack([(x + flow[0]) / width, (y[:, None] + flow[1]) / height], dim=-1) * 2 - 1
    how = {"mode": mode, "padding_mode": "border", "align_corners": False}
    return functional.grid_sample(planes[None], at[None], **how)[0]


def optical_flow(image: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """Where each pixel of the target is in the image, as an offset. (2, H, W) pixels

    image, target: (C, H, W); inside: how much each pixel counts, (H, W); all in [0, 1]
    """
    pyramid = [(image, target, inside[None])]
    while len(pyramid) < LEVELS and min(pyramid[-1][0].shape[1:]) >= 8 * FLOW_WINDOW:
        pyramid.append(tuple(functional.avg_pool2d(planes[None], 2)[0] for planes in pyramid[-1]))
    flow = torch.zeros(2, *pyramid[-1][0].shape[1:], device=image.device)
    for image, target, inside in reversed(pyramid):
        size = image.shape[1:]
        if flow.shape[1:] != size:
            flow = 2 * functional.interpolate(flow[None], size, mode="bilinear")[0]
        # The finest level of a large image would take most of the time and add little.
        for _ in range(STEPS if max(size) <= LARGE else 0):
            moved = moved_by(image, flow)
            gy, gx = torch.gradient(moved, dim=(1, 2))
            error = moved - target
            products = torch.stack([gx * gx, gx * gy, gy * gy, gx * error, gy * error]).sum(dim=1)
            xx, xy, yy, xe, ye = smoothed(products * inside, FLOW_WINDOW)
            xx = xx + STIFFNESS
            yy = yy + STIFFNESS
            step = torch.stack([xy * ye - yy * xe, xy * xe - xx * ye]) / (xx * yy - xy * xy)
            flow = flow + step.clamp(-1, 1)
        flow = smoothed(flow, FLOW_WINDOW // 2)
    limit = MAX_SHIFT * max(flow.shape[1:])
    return flow * (limit / flow.norm(dim=0).clamp_min(limit))


def aligned(image: Tensor, target: Tensor, covered: Tensor, gain: Tensor) -> Tensor:
    """A photograph moved to the places of a render; what differs even so counts little.

    Args:
        image: Colours and how much each pixel counts. (4, H, W) in [0, 1]
        target: The render. (3, H, W) in [0, 1]
        covered: Its pixels that show the surface. (H, W) bool
        gain: That of :func:`gain_between`. (3, 1, 1)
    """
    colors, weight = image.split([3, 1])
    inside = weight[0] * covered
    greys = (planes.mean(dim=0, keepdim=True) for planes in (colors * gain, target))
    flow = optical_flow(*greys, inside)
    # Bilinear twice would blur. Bicubic reads two pixels around, of which all have to count.
    colors = moved_by(colors, flow, "bicubic").clamp(0, 1)
    weight = moved_by(-functional.max_pool2d(-weight, 5, 1, 2), flow)
    agreement = _agreement(colors * gain, target, inside).clamp_min(MIN_AGREEMENT)
    return torch.cat([colors, weight * agreement])


def gain_between(image: Tensor, target: Tensor, covered: Tensor) -> Tensor:
    """Gain per channel that brings a photograph to a render. Shapes as of :func:`aligned`"""
    colors, weight = image.split([3, 1])
    # By the means: least squares would darken, because noise counts as a smaller gain.
    weight = weight * covered * ((colors - target).abs().amax(dim=0) < OUTLIER_COLOR)
    above, below = ((planes * weight).sum(dim=(1, 2)) + 1e-3 for planes in (target, colors))
    return (above / below)[:, None, None]


def _agreement(colors: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """How much colours are those of a target: 1 where they are, down to 0. (H, W)"""
    error = (colors - target).square().mean(dim=0)
    error, counts = smoothed(torch.stack([error * inside, inside]), 2)
    error = error / counts.clamp_min(1e-6)
    within = error[inside > 0]
    usual = within.median().clamp_min(MIN_ERROR**2) if within.numel() else MIN_ERROR**2
    return 1 / (1 + (error / (OUTLIER**2 * usual)).square())


@dataclass(frozen=True)
class Resolution:
    """How finely views show the vertices of a mesh."""

    vertices: Tensor  # (V, 3) world units
    faces: Tensor  # (F, 3)
    normals: Tensor  # (V, 3)
    best: Tensor  # pixels per squared world unit in the best view; 0 where none shows it, (V,)

    @classmethod
    def of(cls, vertices: Tensor, faces: Tensor, cameras: Sequence[Camera]) -> Resolution:
        normals = vertex_normals(vertices, faces)
        found = cls(vertices, faces, normals, torch.zeros_like(vertices[:, 0]))
        for camera in cameras:
            torch.maximum(found.best, found.in_view(camera), out=found.best)
        return found

    def in_view(self, camera: Camera) -> Tensor:
        """Pixels per squared world unit; 0 where something hides the vertex. (V,)"""
        shown, row, column = pixels_of_points(self.vertices, self.vertices, self.faces, camera)
        moved = to_camera(self.vertices, camera)
        rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=moved.device)
        cosine = -(self.normals @ rotation.T * functional.normalize(moved, dim=1)).sum(dim=1)
        sides = [column, camera.width - 1 - column, row, camera.height - 1 - row]
        border = BORDER * max(camera.width, camera.height)
        inside = (torch.stack(sides).amin(dim=0) / border).clamp(0, 1)
        finest = camera.fx * camera.fy / moved[:, 2].square()
        return torch.where(shown, cosine.clamp_min(0) * inside * finest, 0.0)

    def preferred(self, camera: Camera) -> Tensor:
        """How much more a view counts: 1 where it is the best, 0 below a share of that. (V,)"""
        share = self.in_view(camera) / self.best.clamp_min(1e-30)
        return ((share - LEAST_SHARE) / (1 - LEAST_SHARE)).clamp_min(0).square()


@torch.no_grad()
def bake_photographs(
    baker: Baker,
    photograph: Callable[[Camera], Tensor],
    face_colors: Tensor,
    resolution: Resolution,
) -> BakedTexture:
    """Colour a mesh from photographs: ``photograph`` gives their colours, and how much each pixel
    counts, (H, W, 4) in [0, 1]. face_colors: as of :meth:`Baker.bake`
    """

    def first(camera: Camera) -> ViewColors:
        return ViewColors(photograph(camera), resolution.preferred(camera))

    def lacking(camera: Camera) -> ViewColors:
        target = render_textured(mesh, camera, supersampling=2).permute(2, 0, 1)
        covered = rasterize_triangles(baker.vertices, baker.faces, camera).covered
        image = photograph(camera).permute(2, 0, 1)
        gain = gains[camera.name] = gain_between(image, target, covered)
        colors, weight = aligned(image, target, covered, gain).split([3, 1])
        # A pixel on the outline is not of the surface alone.
        weight = weight * eroded(covered, 1)
        missing = colors * gain - target
        if _gradient_energy(target, weight) > SHARP * _gradient_energy(colors * gain, weight):
            # More would be sharper than the photographs where mesh and cameras are not exact.
            missing = smoothed(missing * weight, WINDOW) / smoothed(weight, WINDOW).clamp_min(1e-6)
        else:
            # Reading a texture blurs it, so its finest details have to be stronger.
            missing = 2 * missing - smoothed(missing, 1)
        shown = torch.cat([missing, weight]).permute(1, 2, 0)
        return ViewColors(shown, resolution.preferred(camera))

    def median_gain() -> Tensor:
        return torch.stack(list(gains.values())).median(dim=0).values.flatten()

    def progress(n: int, done: int, total: int) -> None:
        baker.on_view(n * total + done, 2 * total)

    baked = replace(baker, on_view=partial(progress, 0)).bake(first, face_colors)
    mesh = TexturedMesh(baker.vertices, baker.faces, baker.atlas.uvs, baked.texture)
    gains = {}
    # In the exposure of the median photograph, whichever views resolve most.
    adding = replace(baker, on_view=partial(progress, 1))
    return replace(baked, texture=adding.add(baked.texture, lacking, median_gain))


def _gradient_energy(image: Tensor, weight: Tensor) -> float:
    """Weighted sum of squared differences of neighbours. (3, H, W), (1, H, W)"""
    across = (image[:, :, 1:] - image[:, :, :-1]).square() * weight[:, :, 1:]
    down = (image[:, 1:] - image[:, :-1]).square() * weight[:, 1:]
    return float(across.sum() + down.sum())
