# SPDX-License-Identifier: Apache-2.0
"""Textures of photographs: sharp, without seams, and without what is no part of the surface."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sugar_extractors.texture.photo_baking import (
    Resolution,
    aligned,
    bake_photographs,
    moved_by,
    optical_flow,
    smoothed,
)
from sugar_extractors.texture.texture_atlas import (
    fitting_square_size,
    largest_square_size,
    make_atlas,
)
from sugar_extractors.texture.texture_baking import Baker
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import UserError
from tests.support.random_scenes import look_at

N = 9  # vertices along a side of the plane


def plane() -> tuple[torch.Tensor, torch.Tensor]:
    """The square from -1 to 1 at z = 0, seen from above."""
    line = torch.linspace(-1, 1, N)
    y, x = torch.meshgrid(line, line, indexing="ij")
    vertices = torch.stack([x.flatten(), y.flatten(), torch.zeros(N * N)], dim=1)
    first = (torch.arange(N - 1)[:, None] * N + torch.arange(N - 1)).flatten()
    lower = torch.stack([first, first + 1, first + N], dim=1)
    upper = torch.stack([first + 1, first + N + 1, first + N], dim=1)
    return vertices, torch.cat([lower, upper])


CAMERAS = [
    look_at(
        (1.2 * np.cos(turn), 1.2 * np.sin(turn), 2.5 + 0.1 * k),
        width=120,
        height=100,
        focal=110.0,
        name=f"{k}",
    )
    for k, turn in enumerate(np.linspace(0, 2 * np.pi, 8, endpoint=False))
]


def pattern(points: torch.Tensor) -> torch.Tensor:
    """Waves of seven pixels on a slow gradient. (..., 3) -> (..., 3)"""
    x, y = points[..., 0], points[..., 1]
    fine = 0.15 * torch.sin(22 * x) * torch.sin(19 * y + 0.5)
    return torch.stack([0.5 + fine + 0.1 * x, 0.45 + fine, 0.5 - fine + 0.1 * y], dim=-1)


def picture(camera, n=3):
    """Render the painted plane: colours (H, W, 3) and weights, which are 1."""
    vertices, faces = plane()
    fine = camera.resized(camera.width * n, camera.height * n)
    hits = rasterize_triangles(vertices, faces, fine)
    corners = vertices[faces[hits.face.clamp_min(0).long()]]
    colors = pattern((corners * hits.barycentrics[..., None]).sum(dim=2))
    colors[~hits.covered] = 0.2
    colors = colors.reshape(camera.height, n, camera.width, n, 3).mean(dim=(1, 3))
    return torch.cat([colors, torch.ones(camera.height, camera.width, 1)], dim=2)


def bake(photograph, cameras=CAMERAS):
    vertices, faces = plane()
    resolution = Resolution.of(vertices, faces, cameras)
    size = fitting_square_size("squares", vertices, faces, resolution.best)
    atlas = make_atlas("squares", vertices, faces, size)
    own = torch.full((len(faces), 3), 0.5)
    baker = Baker(vertices, faces, atlas, cameras)
    baked = bake_photographs(baker, photograph, own, resolution)
    return TexturedMesh(vertices, faces, atlas.uvs, baked.texture)


NEW_VIEW = look_at((0.5, -0.9, 2.6), width=120, height=100, focal=110.0, name="new")


def compared(mesh, camera=NEW_VIEW):
    """Render and picture of a view inside of the plane's outline. Two of (P, 3), and energies"""
    image, expected = render_textured(mesh, camera, supersampling=2), picture(camera)[..., :3]
    covered = rasterize_triangles(mesh.vertices, mesh.faces, camera).covered
    inside = torch.nn.functional.max_pool2d((~covered)[None].float(), 9, 1, 4)[0] == 0
    steps = [(part[:, 1:] - part[:, :-1])[inside[:, 1:]] for part in (image, expected)]
    energies = [float(step.square().sum()) for step in steps]
    return image[inside][:4000], expected[inside][:4000], energies[0] / energies[1]


def test_a_sharp_surface_stays_sharp():
    found, expected, sharpness = compared(bake(picture))
    assert (found - expected).abs().mean() < 0.012
    assert 0.85 < sharpness < 1.1


@pytest.mark.slow
def test_exposures_leave_neither_seams_nor_a_cast():
    gains = {camera.name: 0.8 + 0.4 * k / 7 for k, camera in enumerate(CAMERAS)}

    def changing(camera):
        return picture(camera) * torch.tensor([gains[camera.name]] * 3 + [1.0])

    (even, _, _), (changed, _, _) = (compared(bake(source)) for source in (picture, changing))
    ratio = (changed / even).reshape(-1, 40, 3).mean(dim=1)
    # Views are between 0.8 and 1.2 times as bright.
    assert float(ratio.std()) < 0.02
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.05)


def test_what_moves_in_front_of_the_surface_is_left_out():
    def occluded(camera):
        image, k = picture(camera), int(camera.name)
        x, y = round(0.618 * k % 1 * 90), round(0.382 * k % 1 * 75)
        image[y : y + 25, x : x + 30, :3] = torch.tensor([1.0, 0.0, 0.9])
        return image

    found, expected, _ = compared(bake(occluded))
    assert (found - expected).abs().mean() < 0.025
    assert (found - expected).abs().amax(dim=1).quantile(0.99) < 0.2


def test_what_a_mask_leaves_out_gives_no_colour():
    def masked(camera):
        image = picture(camera)
        image[:, 60:] = torch.tensor([1.0, 0.0, 0.9, 0.0])
        return image

    found, expected, _ = compared(bake(masked))
    assert (found - expected).abs().max() < 0.2


def test_photographs_that_are_off_by_pixels_are_aligned():
    def shifted(camera):
        k = int(camera.name)
        flow = torch.tensor([1.5 * np.cos(k), 1.5 * np.sin(k)], dtype=torch.float32)
        planes = picture(camera).permute(2, 0, 1)
        moved = moved_by(planes, flow[:, None, None].expand(2, *planes.shape[1:]), "bicubic")
        return moved.clamp(0, 1).permute(1, 2, 0)

    _, _, sharpness = compared(bake(shifted))
    assert sharpness > 0.75


def test_flow_finds_a_shift_and_stays_where_nothing_is_seen():
    planes = (
        smoothed(torch.rand(1, 90, 120, generator=torch.Generator().manual_seed(1)), 2) * 8 - 3.5
    )
    flow = torch.tensor([0.9, -0.6])[:, None, None].expand(2, 90, 120)
    inside = torch.ones(90, 120)
    found = optical_flow(planes, moved_by(planes, flow, "bicubic"), inside)
    assert (found - flow)[:, 15:-15, 15:-15].abs().mean() < 0.1
    assert optical_flow(planes, planes, inside).abs().max() < 0.05
    flat = torch.full_like(planes, 0.5)
    assert optical_flow(flat, flat, inside).abs().max() == 0
    black, nowhere = torch.zeros(4, 90, 120), torch.zeros(90, 120) > 0
    nothing = aligned(black, black[:3], nowhere, 1.0)
    assert torch.isfinite(nothing).all()


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_a_texel_is_a_pixel_of_the_best_view(kind):
    if kind == "xatlas":
        pytest.importorskip("xatlas")
    vertices, faces = plane()
    sizes = []
    for focal in (110.0, 220.0, 440.0):
        cameras = [look_at((0.1, 0.1, 2.5), width=1000, height=1000, focal=focal, name="a")]
        resolution = Resolution.of(vertices, faces, cameras)
        sizes.append(fitting_square_size(kind, vertices, faces, resolution.best))
    legs = [size - 4 for size in sizes] if kind == "squares" else sizes
    # A side of a triangle is a quarter of a unit long.
    expected = [focal / 2.5 * 2 / (N - 1) for focal in (110.0, 220.0, 440.0)]
    for leg, pixels in zip(legs, expected, strict=True):
        assert 0.9 * pixels < leg < 1.6 * pixels + 2


def test_a_texture_that_holds_no_triangle_is_refused():
    assert largest_square_size(20_000, 8_192) == 81
    with pytest.raises(UserError, match="use --texture_size 505 or more"):
        largest_square_size(20_000, 300)
