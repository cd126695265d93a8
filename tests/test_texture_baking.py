# SPDX-License-Identifier: Apache-2.0
"""Colours of textures: right places, no seams, no leaks past occluders, bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sugar_extractors.texture import texture_baking
from sugar_extractors.texture.texture_atlas import make_atlas
from sugar_extractors.texture.texture_baking import (
    BYTES_PER_TEXEL,
    Baker,
    BakingConfig,
    ViewColors,
    _bands,
    with_filled_gaps,
)
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured, sample_texture
from sugar_scene.triangle_rasterizer import rasterize_triangles
from tests.support.mesh_scenes import cameras_around
from tests.support.random_scenes import look_at

CAMERAS = cameras_around(8, width=128)
BAKING = BakingConfig()


def sphere(n: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """A unit sphere of 2 n (n - 1) triangles or so; every edge is shared."""
    vertices = [(0.0, 0.0, 1.0)]
    for i in range(1, n):
        for j in range(n):
            polar, turn = np.pi * i / n, 2 * np.pi * (j + 0.5 * (i % 2)) / n
            vertices.append(
                (np.sin(polar) * np.cos(turn), np.sin(polar) * np.sin(turn), np.cos(polar))
            )
    vertices.append((0.0, 0.0, -1.0))
    faces = []
    for j in range(n):
        after = (j + 1) % n
        faces.append((0, 1 + j, 1 + after))
        for i in range(n - 2):
            a, b = 1 + i * n, 1 + (i + 1) * n
            shift = (i + 1) % 2
            faces.append((a + j, b + (j + 1 - shift) % n, a + after))
            faces.append((b + (j - shift) % n, b + (j + 1 - shift) % n, a + j))
        faces.append((len(vertices) - 1, 1 + (n - 2) * n + after, 1 + (n - 2) * n + j))
    return torch.tensor(vertices, dtype=torch.float32), torch.tensor(faces)


def paint(points: torch.Tensor) -> torch.Tensor:
    """A smooth colour of every point of space. (..., 3) -> (..., 3)"""
    shift = points.new_tensor([0.0, 1.0, 2.0])
    return 0.5 + 0.4 * torch.sin(2.0 * points + shift)


def painted_source(vertices, faces, color=paint):
    """Pictures of a mesh whose surface is painted; white behind it."""

    def picture(camera):
        hits = rasterize_triangles(vertices, faces, camera)
        image = torch.ones(camera.height, camera.width, 3)
        corners = vertices[faces[hits.face[hits.covered].long()]]
        weights = hits.barycentrics[hits.covered][..., None]
        image[hits.covered] = color((corners * weights).sum(dim=1))
        return ViewColors(image)

    return picture


def bake(vertices, faces, kind="squares", size=10, cameras=CAMERAS, color=paint, config=BAKING):
    if kind == "xatlas":
        pytest.importorskip("xatlas")
    atlas = make_atlas(kind, vertices, faces, size)
    own = torch.full((len(faces), 3), 0.5)
    source = painted_source(vertices, faces, color)
    return atlas, Baker(vertices, faces, atlas, cameras, config).bake(source, own)


def test_pixels_that_do_not_count_give_no_colour():
    vertices, faces = sphere()
    atlas = make_atlas("squares", vertices, faces, 6)
    own, camera = torch.full((len(faces), 3), 0.5), CAMERAS[0]

    def half(_):
        image = torch.ones(camera.height, camera.width, 4)
        image[:, :64, 3] = 0
        image[:, :64, :3] = 0
        return ViewColors(image)

    baker = Baker(vertices, faces, atlas, [camera])
    baked = baker.bake(half, own)
    whole = baker.bake(lambda _: ViewColors(half(_).image[..., :3]), own)
    assert 0.3 < baked.seen_texels / whole.seen_texels < 0.6
    # White where it was seen, else the faces' own grey: nowhere black.
    assert int(baked.texture.min()) > 100
    assert int(whole.texture.min()) == 0


def surface_points(vertices, faces, weights):
    return torch.einsum("kc,fcd->fkd", weights, vertices[faces])


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_the_surface_gets_the_colours_of_the_pictures(kind):
    vertices, faces = sphere()
    atlas, baked = bake(vertices, faces, kind)
    weights = torch.rand(30, 3).log().softmax(dim=1)
    uvs = torch.einsum("kc,fcd->fkd", weights, atlas.uvs).reshape(-1, 2)
    found = sample_texture(baked.texture, uvs)
    expected = paint(surface_points(vertices, faces, weights)).reshape(-1, 3)
    assert (found - expected).abs().mean() < 0.008
    assert (found - expected).abs().max() < 0.05
    assert baked.seen_faces == len(faces)
    assert baked.seen_texels > 0.98 * baked.face_texels


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_bilinear_filtering_shows_no_seam_at_shared_edges(kind):
    vertices, faces = sphere(10)
    atlas, baked = bake(vertices, faces, kind, cameras=cameras_around(8, width=160))
    shares = torch.linspace(0, 1, 21)[:, None]
    sides = {}
    for face, rows in enumerate(faces.tolist()):
        for k in range(3):
            a, b = rows[k], rows[(k + 1) % 3]
            ends = atlas.uvs[face, [k, (k + 1) % 3]]
            start, end = (ends[0], ends[1]) if a < b else (ends[1], ends[0])
            uvs = (1 - shares) * start + shares * end
            sides.setdefault((min(a, b), max(a, b)), []).append(sample_texture(baked.texture, uvs))
    pairs = [pair for pair in sides.values() if len(pair) == 2]
    assert len(pairs) > 150
    gaps = torch.stack([(one - other).abs() for one, other in pairs])
    # From texel to texel the colour changes by 0.04 to 0.08.
    assert gaps.max() < 0.05
    assert gaps.mean() < 0.006


def test_surfaces_behind_others_take_no_colour_from_them():
    wall = torch.tensor([[-4.0, -4, 0], [4, -4, 0], [4, 4, 0], [-4, 4, 0]])
    shield = wall * 0.25 + torch.tensor([0.0, 0, 1])
    vertices = torch.cat([wall, shield])
    faces = torch.tensor([[0, 1, 2], [0, 2, 3], [4, 5, 6], [4, 6, 7]])

    def color(points):
        front = points[:, 2:] > 0.5
        return torch.where(front, points.new_tensor([1.0, 0, 0]), points.new_tensor([0, 0, 1.0]))

    cameras = [
        look_at((x, y, 6.0), width=120, height=100, focal=80.0, name=f"{x}{y}")
        for x in (-0.5, 0.5)
        for y in (-0.5, 0.5)
    ]
    _, baked = bake(vertices, faces, size=60, cameras=cameras, color=color)
    texture = baked.texture.float() / 255
    wall_red, shield_blue = [], []
    owners = make_atlas("squares", vertices, faces, 60).texel_faces(0, texture.shape[0]).flip(0)
    wall_red = texture[(owners >= 0) & (owners < 2)][:, 0]
    shield_blue = texture[owners >= 2][:, 2]
    assert wall_red.max() == 0
    assert shield_blue.max() == 0


def test_what_no_view_shows_gets_the_colour_of_its_face_or_of_its_gaussians():
    vertices = torch.tensor([[-1.0, -1, 0], [1, -1, 0], [0, 1, 0], [9, 9, 9], [9, 8, 9], [8, 9, 9]])
    faces = torch.tensor([[0, 1, 2], [3, 4, 5]])
    # Sees the left part of the first triangle only.
    camera = look_at((-1.2, -0.6, 2.0), width=40, height=40, focal=60.0, name="a")
    atlas = make_atlas("squares", vertices, faces, 40)
    own = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    red = torch.tensor([1.0, 0.0, 0.0])
    baker = Baker(vertices, faces, atlas, [camera])
    baked = baker.bake(lambda c: ViewColors(red.expand(c.height, c.width, 3)), own)
    owners = atlas.texel_faces(0, atlas.side).flip(0)
    assert 0 < baked.seen_texels < int((owners == 0).sum())
    assert (baked.texture[owners == 0] == torch.tensor([255, 0, 0])).all()
    assert (baked.texture[owners == 1] == torch.tensor([0, 0, 255])).all()
    assert baked.seen_faces == 1


def test_every_view_counts_with_its_own_intrinsics():
    vertices, faces = sphere(10)
    wide = [
        look_at(
            (3.0, 0.5, 0.2), width=150, height=90, focal=120.0, principal=(9.0, -7.0), name="a"
        ),
        look_at((0.2, 3.5, 0.4), width=80, height=140, focal=150.0, principal=(0.0, 5.0), name="b"),
        look_at((-2.0, -2.0, 1.0), width=100, height=100, focal=90.0, name="c"),
    ]
    atlas, baked = bake(vertices, faces, cameras=wide)
    mesh = TexturedMesh(vertices, faces, atlas.uvs, baked.texture)
    for camera in wide:
        expected = painted_source(vertices, faces)(camera).image
        found = render_textured(mesh, camera, torch.ones(3))
        assert (found - expected).abs().max() < 0.06


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_bands_are_the_whole(kind):
    vertices, faces = sphere(8)
    atlas, whole = bake(vertices, faces, kind, cameras=CAMERAS[:3])
    budget = BYTES_PER_TEXEL * atlas.side * 37
    config = BakingConfig(budget_bytes=budget)
    _, parts = bake(vertices, faces, kind, cameras=CAMERAS[:3], config=config)
    assert whole.n_bands == 1
    assert parts.n_bands == len(_bands(atlas.side, budget)) == -(-atlas.side // 37)
    assert torch.equal(parts.texture, whole.texture)
    assert (parts.seen_texels, parts.face_texels) == (whole.seen_texels, whole.face_texels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
@pytest.mark.parametrize("n", [5, 14, 60])
def test_faces_that_are_passed_over_would_have_found_nothing(kind, n, monkeypatch):
    """Faces far larger than a pixel, of its size, and smaller."""
    vertices, faces = sphere(n)
    size = {5: 24, 14: 10, 60: 5}[n]
    _, passing = bake(vertices, faces, kind, size, cameras=CAMERAS[:4])
    asked = []
    usual = texture_baking.launch

    def ask_all(kernel, n_items, inputs, **how):
        usual(kernel, n_items, inputs, **how)
        if kernel is texture_baking.find_visible:
            asked.append(float(inputs[-1].float().mean()))
            inputs[-1].fill_(1)

    monkeypatch.setattr(texture_baking, "launch", ask_all)
    _, asking = bake(vertices, faces, kind, size, cameras=CAMERAS[:4])
    assert torch.equal(passing.texture, asking.texture)
    assert (passing.seen_texels, passing.seen_faces) == (asking.seen_texels, asking.seen_faces)
    assert len(asked) == 4
    # Large faces reach to where others are seen; of many small ones about half are hidden.
    assert n < 60 or max(asked) < 0.8


def test_the_default_budget_takes_the_default_texture_in_one_band():
    assert len(_bands(8008, BakingConfig().budget_bytes)) == 1
    assert BakingConfig().budget_bytes <= 1.25 * 2**30
    assert len(_bands(16016, BakingConfig().budget_bytes)) == 4


def test_threads_do_not_change_bits():
    vertices, faces = sphere(8)
    before = torch.get_num_threads()
    try:
        textures = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            textures.append(bake(vertices, faces, cameras=CAMERAS[:2])[1].texture)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*textures)


def test_degenerate_triangles_and_no_views_are_filled():
    vertices = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0]])
    faces = torch.tensor([[0, 1, 2], [0, 0, 0], [0, 1, 3]])
    atlas, baked = bake(vertices, faces)
    owners = atlas.texel_faces(0, atlas.side).flip(0)
    assert (baked.texture[owners == 1] == 128).all()
    assert baked.texture[owners == 2].float().std() > 1
    _, blind = bake(vertices, faces, cameras=[])
    assert (blind.texture == 128).all()


def test_supersampling_averages_rays():
    vertices, faces = sphere(8)
    atlas, baked = bake(vertices, faces, cameras=CAMERAS[:2])
    mesh = TexturedMesh(vertices, faces, atlas.uvs, baked.texture)
    camera, sky = CAMERAS[0], torch.tensor([0.0, 0.0, 1.0])
    coarse = render_textured(mesh, camera, sky, supersampling=2)
    fine = render_textured(mesh, camera.resized(2 * camera.width, 2 * camera.height), sky)
    assert coarse.shape == (camera.height, camera.width, 3)
    torch.testing.assert_close(coarse[3, 5], fine[6:8, 10:12].mean(dim=(0, 1)))
    covered = rasterize_triangles(vertices, faces, camera).covered
    assert (render_textured(mesh, camera, sky)[~covered] == sky).all()


def test_gaps_between_charts_continue_their_colours():
    vertices, faces = sphere(10)
    atlas = make_atlas("charts", vertices, faces, 10)
    owned = atlas.texel_faces(0, atlas.side) >= 0
    picture = torch.zeros(atlas.side, atlas.side, 3, dtype=torch.uint8)
    # Left red, right blue: no gap takes a third colour.
    picture[:, : atlas.side // 2] = torch.tensor([200, 0, 0], dtype=torch.uint8)
    picture[:, atlas.side // 2 :] = torch.tensor([0, 0, 200], dtype=torch.uint8)
    black = torch.where(owned.flip(0)[..., None], picture, torch.zeros_like(picture))
    filled = with_filled_gaps(black, atlas)
    assert torch.equal(filled[owned.flip(0)], picture[owned.flip(0)])
    assert (filled.int().sum(dim=2) - 200).abs().max() <= 1
    beside = torch.nn.functional.max_pool2d(owned.flip(0)[None].float(), 5, 1, 2)[0] > 0
    beside &= ~owned.flip(0)
    reds = filled[..., 0][:, : atlas.side // 3][beside[:, : atlas.side // 3]]
    assert len(reds) > 100
    assert (reds > 150).float().mean() > 0.95
