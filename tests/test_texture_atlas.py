# SPDX-License-Identifier: Apache-2.0
"""Where triangles lie in a texture: the layout of the original, and unfolded charts."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sugar_extractors.texture.charts import without_noise
from sugar_extractors.texture.plane_geometry import cells_inside
from sugar_extractors.texture.texture_atlas import (
    MAX_SIDE,
    fitting_square_size,
    make_atlas,
    squares_atlas,
    squares_per_axis,
)
from sugar_scene.mesh_files.textured_mesh_io import shared_corners
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import icosahedron


def signed_areas(corners: torch.Tensor) -> torch.Tensor:
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2


def texels_inside(corners: np.ndarray, side: int) -> np.ndarray:
    """Texel centres strictly inside a triangle. (n, 2) as x, y"""
    y, x = np.mgrid[:side, :side]
    points = np.stack([x.ravel(), y.ravel()], axis=1) + 0.5
    a, b, c = corners
    matrix = np.stack([b - a, c - a], axis=1)
    u, v = np.linalg.solve(matrix, (points - a).T)
    inside = (u > 1e-6) & (v > 1e-6) & (u + v < 1 - 1e-6)
    return np.stack([x.ravel(), y.ravel()], axis=1)[inside]


def test_squares_have_the_coordinates_of_the_original():
    size, n_faces = 10, 7
    atlas = squares_atlas(n_faces, size)
    per_axis = int((n_faces // 2 + 1) ** 0.5 + 1)
    assert atlas.side == size * per_axis
    for face in range(n_faces):
        a, b = divmod(face // 2, per_axis)
        if face % 2 == 0:
            expected = [
                ((a + 1) * size - 2, b * size + 1),
                (a * size + 2, b * size + 1),
                ((a + 1) * size - 2, (b + 1) * size - 3),
            ]
        else:
            expected = [
                (a * size + 1, (b + 1) * size - 1),
                (a * size + 1, b * size + 3),
                ((a + 1) * size - 3, (b + 1) * size - 1),
            ]
        assert atlas.corners[face].tolist() == [list(map(float, corner)) for corner in expected]
    torch.testing.assert_close(atlas.uvs * atlas.side, atlas.corners)


def test_the_default_atlas_of_two_million_triangles_is_8008_texels_wide():
    assert squares_per_axis(2_000_000) * 8 == 8008
    assert squares_per_axis(200_000) * 8 == 2536


@pytest.mark.parametrize("size", [5, 8, 10])
def test_squares_give_texels_inside_a_triangle_to_its_face(size):
    atlas = squares_atlas(9, size)
    owners = atlas.texel_faces(0, atlas.side).numpy()
    for face, corners in enumerate(atlas.corners.double().numpy()):
        for x, y in texels_inside(corners, atlas.side):
            assert owners[y, x] == face
    # Bilinear filtering on the outline reads texels around it: they belong to the face as well.
    for face, corners in enumerate(atlas.corners.double().numpy()):
        for k in range(3):
            for t in np.linspace(0, 1, 41):
                x, y = (1 - t) * corners[k] + t * corners[(k + 1) % 3] - 0.5
                for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)):
                    share = (1 - abs(x - (np.floor(x) + i))) * (1 - abs(y - (np.floor(y) + j)))
                    if share > 1e-9:
                        assert owners[int(np.floor(y)) + j, int(np.floor(x)) + i] == face


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_rows_by_themselves_are_the_rows_of_the_whole(kind):
    atlas = ball_atlas(kind)
    whole = atlas.texel_faces(0, atlas.side)
    assert whole.shape == (atlas.side, atlas.side)
    assert set(whole.unique().tolist()) >= set(range(20))
    parts = [atlas.texel_faces(y, min(y + 7, atlas.side)) for y in range(0, atlas.side, 7)]
    assert torch.equal(torch.cat(parts), whole)


def ball_atlas(kind: str):
    if kind == "xatlas":
        pytest.importorskip("xatlas")
    mesh = icosahedron()
    vertices, faces = torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.faces)
    return make_atlas(kind, vertices, faces, 10)


@pytest.mark.parametrize("kind", ["squares", "charts", "xatlas"])
def test_triangles_lie_inside_the_texture_and_do_not_overlap(kind):
    atlas = ball_atlas(kind)
    assert atlas.uvs.shape == (20, 3, 2)
    assert atlas.uvs.min() >= 0
    assert atlas.uvs.max() <= 1
    assert signed_areas(atlas.corners).abs().min() > 1
    owners = atlas.texel_faces(0, atlas.side).numpy()
    for face, corners in enumerate(atlas.corners.double().numpy()):
        inside = texels_inside(corners, atlas.side)
        assert (owners[inside[:, 1], inside[:, 0]] == face).all()


def test_charts_keep_angles_and_a_margin():
    atlas = ball_atlas("xatlas")
    # All faces of an icosahedron are alike; squares would make them right-angled.
    areas = signed_areas(atlas.corners).abs()
    assert areas.max() / areas.min() < 1.5
    owners = atlas.texel_faces(0, atlas.side)
    strict = atlas._rasterized_faces(0, atlas.side)
    grown = (owners >= 0) & (strict < 0)
    assert grown.any()
    assert (owners[strict >= 0] == strict[strict >= 0]).all()


def test_sizes_that_cannot_work_are_refused():
    points, faces = torch.rand(3, 3), torch.tensor([[0, 1, 2]])
    with pytest.raises(UserError, match=r"--square_size 4 .* use 5 or more"):
        make_atlas("squares", points, faces, 4)
    with pytest.raises(UserError, match=rf"more than {MAX_SIDE}; use --square_size 32 or less"):
        make_atlas("squares", points, faces.expand(2_000_000, 3), 40)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xatlas", None)
    with pytest.raises(UserError, match="pip install xatlas"):
        make_atlas("xatlas", torch.rand(3, 3), torch.tensor([[0, 1, 2]]), 8)


def blob(seed: int = 0, subdivisions: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """A closed surface with limbs and noise, as reconstructions have it."""
    trimesh = pytest.importorskip("trimesh")
    ball = trimesh.creation.icosphere(subdivisions=subdivisions)
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(6, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    limbs = np.exp(12 * (ball.vertices @ directions.T - 1)).sum(axis=1, keepdims=True)
    noise = 1 + 0.004 * rng.normal(size=(len(ball.vertices), 1))
    points = ball.vertices * (0.6 + 1.2 * limbs) * noise
    return torch.tensor(points, dtype=torch.float32), torch.tensor(ball.faces)


@pytest.mark.parametrize("kind", ["charts", pytest.param("xatlas", marks=pytest.mark.slow)])
def test_charts_fill_the_square_and_share_their_corners(kind):
    if kind == "xatlas":
        pytest.importorskip("xatlas")
    vertices, faces = blob()
    square = 10
    atlas = make_atlas(kind, vertices, faces, square)
    squares = make_atlas("squares", vertices, faces, square)
    assert atlas.side <= squares.side
    # The original's layout of squares of 10 uses 36 % of its pixels.
    assert squares.filled_share == pytest.approx(0.36, abs=0.01)
    assert atlas.filled_share >= 0.6
    # The same surface has no fewer texels than before.
    assert atlas.filled_share * atlas.side**2 > 1.6 * squares.filled_share * squares.side**2
    shared = shared_corners(faces, atlas.uvs)
    assert len(shared.vertices) < 1.5 * len(vertices)
    assert len(shared_corners(faces, squares.uvs).vertices) == 3 * len(faces)


def test_charts_have_at_least_the_texels_of_squares_where_the_size_is_automatic():
    vertices, faces = blob(2, 4)
    resolution = 3e3 * (1.5 + vertices[:, 0]).square()
    found = {}
    for kind in ("squares", "charts"):
        size = fitting_square_size(kind, vertices, faces, resolution)
        atlas = make_atlas(kind, vertices, faces, size)
        found[kind] = atlas.filled_share * atlas.side**2
    assert found["charts"] >= found["squares"]
    a, b, c = vertices[faces].unbind(1)
    areas = torch.linalg.cross(b - a, c - a).norm(dim=1) / 2
    assert found["charts"] >= float((areas * resolution[faces].mean(dim=1)).sum())


@pytest.mark.slow
def test_texels_of_charts_are_of_about_the_same_size():
    vertices, faces = blob()
    atlas = make_atlas("charts", vertices, faces, 10)
    a, b, c = vertices[faces].unbind(1)
    areas = torch.linalg.cross(b - a, c - a).norm(dim=1) / 2
    density = signed_areas(atlas.corners).abs() / areas
    mean = float((density * areas).sum() / areas.sum())
    order = density.argsort()
    shares = areas[order].cumsum(0) / areas.sum()
    assert float(density[order][shares > 0.05][0]) > 0.3 * mean


@pytest.mark.slow
def test_no_texel_is_of_two_faces():
    """Also where sheets lie above each other, and where noise folds faces over."""
    vertices, faces = blob(1, 4)
    lower = vertices * torch.tensor([1.0, 1.0, 0.2]) - torch.tensor([0.0, 0.0, 3.0])
    both = torch.cat([vertices, lower])
    sheets = torch.cat([faces, faces + len(vertices)])
    # A spiral stair: one connected sheet, three times above itself.
    turn = np.linspace(0, 6 * np.pi, 200)
    stair = np.concatenate(
        [np.stack([r * np.cos(turn), r * np.sin(turn), turn / 6], axis=1) for r in (1.0, 2.0)]
    )
    step = np.arange(199)
    treads = np.concatenate(
        [np.stack([step, step + 200, step + 1], 1), np.stack([step + 1, step + 200, step + 201], 1)]
    )
    for points, rows in (
        (both, sheets),
        (torch.tensor(stair, dtype=torch.float32), torch.tensor(treads)),
    ):
        atlas = make_atlas("charts", points, rows, 10)
        assert (signed_areas(atlas.corners) > 0).all()
        inside = cells_inside(atlas.corners.double().numpy())
        _, counts = np.unique(inside.y * atlas.side + inside.x, return_counts=True)
        assert (counts > 1).mean() < 1e-3
        assert atlas.corners.min() >= 0
        assert atlas.corners.max() <= atlas.side


def test_faces_without_area_do_no_harm():
    points = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [2, 2, 0]])
    faces = torch.tensor([[0, 1, 2], [1, 3, 2], [0, 3, 4], [1, 1, 2]])
    atlas = make_atlas("charts", points, faces, 10)
    assert torch.isfinite(atlas.corners).all()
    assert (signed_areas(atlas.corners)[:2] > 10).all()
    flat = make_atlas("charts", points, faces[2:], 10)
    assert torch.isfinite(flat.corners).all()


def test_only_noise_is_taken_from_what_is_unfolded():
    trimesh = pytest.importorskip("trimesh")
    ball = trimesh.creation.icosphere(subdivisions=5)
    for smooth in (ball, trimesh.creation.box(), trimesh.creation.icosphere(subdivisions=1)):
        assert np.array_equal(without_noise(smooth.vertices, smooth.faces), smooth.vertices)
    rough = ball.vertices * (
        1 + 0.02 * np.random.default_rng(0).normal(size=(len(ball.vertices), 1))
    )
    found = without_noise(rough, ball.faces)
    before, after = (np.std(np.linalg.norm(points, axis=1)) for points in (rough, found))
    assert after < before / 2
    assert np.linalg.norm(found, axis=1).mean() == pytest.approx(1, abs=0.01)
