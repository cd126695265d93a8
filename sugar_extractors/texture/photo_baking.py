# SPDX-License-Identifier: Apache-2.0
"""A texture of photographs: sharp, without seams, and without what is no part of the surface.

A first texture is the mean of all views, weighted by how finely they show the surface. Then each
photograph is brought into agreement with it (``photo_alignment.py``), and what its render lacks of
the photograph is added. That makes the render as sharp as the photographs, which interpolation and
the mean had blurred (back-projection: Irani and Peleg, "Improving resolution by image
registration", 1991). Weights are interpolated between vertices: they are continuous, without seams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import eroded
from sugar_extractors.texture.normal_map import vertex_normals
from sugar_extractors.texture.photo_alignment import aligned, gain_between, smoothed
from sugar_extractors.texture.texture_atlas import Atlas
from sugar_extractors.texture.texture_baking import (
    BakedTexture,
    BakingConfig,
    ViewColors,
    add_to_texture,
    bake_texture,
)
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_rasterizer import pixels_of_points, rasterize_triangles, to_camera

SHARP = 0.9  # gradient energy to that of a photograph, from which only low frequencies are added
WINDOW = 8  # radius in pixels of the windows whose means are those
LEAST_SHARE = 0.2  # of the best resolution, from which a view counts more than others
BORDER = 0.03  # of the longest side: there a view fades out


@dataclass(frozen=True)
class Resolution:
    """How finely views show the vertices of a mesh."""

    vertices: Tensor  # (V, 3) world units
    faces: Tensor  # (F, 3)
    normals: Tensor  # (V, 3)
    best: Tensor  # pixels per squared world unit in the best view; 0 where none shows it, (V,)

    @classmethod
    def of(cls, vertices: Tensor, faces: Tensor, cameras: Sequence[Camera]) -> Resolution:
        found = cls(
            vertices, faces, vertex_normals(vertices, faces), torch.zeros_like(vertices[:, 0])
        )
        for camera in cameras:
            torch.maximum(found.best, found.in_view(camera), out=found.best)
        return found

    def in_view(self, camera: Camera) -> Tensor:
        """Pixels per squared world unit; 0 where something hides the vertex. (V,)"""
        shown, row, column = pixels_of_points(self.vertices, self.vertices, self.faces, camera)
        moved = to_camera(self.vertices, camera)
        rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=moved.device)
        cosine = -(self.normals @ rotation.T * normalize(moved, dim=1)).sum(dim=1)
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
    vertices: Tensor, faces: Tensor, atlas: Atlas, cameras: Sequence[Camera],
    photograph: Callable[[Camera], Tensor], face_colors: Tensor, resolution: Resolution,
    config: BakingConfig, on_view: Callable[[int, int], None] = lambda done, total: None,
) -> BakedTexture:  # fmt: skip
    """Colour a mesh from photographs.

    Args:
        vertices, faces, atlas, face_colors, on_view: As of :func:`bake_texture`.
        photograph: Colours and how much each pixel counts. (H, W, 4) in [0, 1]
    """

    def first(camera: Camera) -> ViewColors:
        return ViewColors(photograph(camera), resolution.preferred(camera))

    def lacking(camera: Camera) -> ViewColors:
        target = render_textured(mesh, camera, supersampling=2).permute(2, 0, 1)
        covered = rasterize_triangles(vertices, faces, camera).covered
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
        on_view(n * total + done, 2 * total)

    surface, views = (vertices, faces, atlas), cameras
    baked = bake_texture(*surface, views, first, face_colors, config, partial(progress, 0))
    mesh, gains = TexturedMesh(vertices, faces, atlas.uvs, baked.texture), {}
    # In the exposure of the median photograph, whichever views resolve most.
    texture = add_to_texture(
        baked.texture, *surface, views, lacking, config, median_gain, partial(progress, 1)
    )
    return replace(baked, texture=texture)


def _gradient_energy(image: Tensor, weight: Tensor) -> float:
    """Weighted sum of squared differences of neighbours. (3, H, W), (1, H, W)"""
    across = (image[:, :, 1:] - image[:, :, :-1]).square() * weight[:, :, 1:]
    down = (image[:, 1:] - image[:, :-1]).square() * weight[:, 1:]
    return float(across.sum() + down.sum())
