# SPDX-License-Identifier: Apache-2.0
"""Vertices that photographs move: correlation of windows, its derivatives, and whole meshes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh.refinement.compared_views import ComparedViews, vertex_terms
from sugar_extractors.mesh.refinement.photometric_refinement import REDUCTIONS, refined_mesh
from sugar_extractors.mesh.refinement.window_correlation import RADIUS, correlate
from sugar_scene.reprojection import NeighborRule, NeighborViews
from sugar_scene.triangle_mesh import TriangleMesh, border_edges, with_vertex_normals
from sugar_scene.triangle_rasterizer import rasterize_triangles
from tests.support.random_scenes import look_at

CPU = torch.device("cpu")
SIDE = 96
N_RINGS = 40
DISTANCE = 4.0
PIXEL = DISTANCE / 150


def random_image(seed: int, height: int = 13, width: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(height, width, generator=generator, dtype=torch.float64)


def brute_force_score(
    first: Tensor, second: Tensor, counts: Tensor, row: int, column: int
) -> float:
    """Correlation of the window around a pixel, of the pixels that count."""
    rows = slice(max(0, row - RADIUS), row + RADIUS + 1)
    columns = slice(max(0, column - RADIUS), column + RADIUS + 1)
    inside = counts[rows, columns].numpy()
    a = first[rows, columns].numpy()[inside]
    b = second[rows, columns].numpy()[inside]
    return float(np.corrcoef(a, b)[0, 1])


def test_scores_are_correlations_of_windows():
    first = random_image(0)
    second = 0.6 * first + 0.4 * random_image(1)
    counts = random_image(2) > 0.1
    found = correlate(first, second, counts)
    for row, column in ((6, 8), (0, 0), (12, 16), (3, 1)):
        expected = brute_force_score(first, second, counts, row, column)
        assert float(found.score[row, column]) == pytest.approx(expected, abs=1e-3)


def test_gain_and_offset_of_an_image_change_nothing():
    first = random_image(0)
    counts = torch.ones_like(first, dtype=torch.bool)
    found = correlate(first, 0.4 * first + 0.3, counts)
    assert found.score.numpy() == pytest.approx(1.0, abs=1e-3)


def test_the_gradient_is_that_of_the_disagreement_by_finite_differences():
    first = random_image(0)
    second = 0.5 * first + 0.5 * random_image(1)
    counts = random_image(2) > 0.1
    found = correlate(first, second, counts)

    def disagreement(image: Tensor) -> float:
        return float((found.weight * (1 - correlate(first, image, counts).score)).sum())

    for row, column in ((6, 8), (0, 0), (4, 14)):
        step = torch.zeros_like(second)
        step[row, column] = 1e-5
        expected = (disagreement(second + step) - disagreement(second - step)) / 2e-5
        expected *= float(counts[row, column])
        assert float(found.gradient[row, column]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert (found.curvature >= 0).all()


def test_windows_without_texture_or_with_few_pixels_have_no_weight():
    first = random_image(0)
    counts = torch.ones_like(first, dtype=torch.bool)
    assert (correlate(torch.full_like(first, 0.5), first, counts).weight == 0).all()
    counts[:] = False
    counts[6, 8] = True
    assert (correlate(first, first, counts).weight == 0).all()


def sphere() -> TriangleMesh:
    """The unit sphere without its poles, so that it has borders."""
    angles = np.linspace(0, 2 * np.pi, 2 * N_RINGS, endpoint=False)
    heights = np.linspace(-0.8, 0.8, N_RINGS)
    height, angle = np.meshgrid(heights, angles, indexing="ij")
    ring = np.sqrt(1 - height**2)
    vertices = np.stack([ring * np.cos(angle), ring * np.sin(angle), height], axis=-1)
    numbers = np.arange(height.size).reshape(height.shape)
    a = numbers[:-1]
    b = np.roll(a, -1, axis=1)
    c = numbers[1:]
    d = np.roll(c, -1, axis=1)
    faces = np.concatenate([np.stack([a, b, c], -1), np.stack([b, d, c], -1)]).reshape(-1, 3)
    points = vertices.reshape(-1, 3)
    return TriangleMesh(points, faces, np.full((len(points), 3), 128, np.uint8))


def cameras() -> list[Camera]:
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    places = [np.array([np.cos(angle), np.sin(angle), 0.1]) * DISTANCE for angle in angles]
    return [
        look_at(place, width=SIDE, height=SIDE, focal=150.0, name=f"{number:02d}")
        for number, place in enumerate(places)
    ]


def pattern(points: Tensor) -> Tensor:
    """Grey values of a texture in space, of waves of 6 to 12 pixels. (..., 3) -> (...)"""
    waves = [
        torch.sin(points @ points.new_tensor(direction) / PIXEL)
        for direction in ((0.9, 0.2, 0.3), (-0.3, 0.8, 0.5), (0.2, -0.4, 0.9), (0.5, 0.5, -0.6))
    ]
    return 0.5 + 0.1 * torch.stack(waves).sum(dim=0)


def photographs(
    truth: TriangleMesh, shade: Callable[[Tensor], Tensor]
) -> Callable[[Camera], Tensor]:
    """Photographs of a mesh, each with another exposure."""
    vertices = torch.from_numpy(truth.vertices).float()
    faces = torch.from_numpy(truth.faces)

    def photograph(camera: Camera) -> Tensor:
        hits = rasterize_triangles(vertices, faces, camera)
        corners = vertices[faces[hits.face.clamp_min(0).long()]]
        points = (hits.barycentrics[..., None] * corners).sum(dim=-2)
        gain = 0.8 + 0.02 * int(camera.name)
        grey = torch.where(hits.covered, gain * shade(points), 0.2)
        return torch.stack([grey, grey, grey, hits.covered.float()], dim=-1)

    return photograph


def views_of(shade: Callable[[Tensor], Tensor]) -> ComparedViews:
    around = cameras()
    rule = NeighborRule(max_angle=35.0, max_baseline=1.0)
    neighbors = NeighborViews(around, DISTANCE, rule)
    return ComparedViews(around, neighbors, photographs(sphere(), shade), CPU)


def bumpy(amplitude: float) -> TriangleMesh:
    """The sphere with bumps of some pixels, which its photographs do not show."""
    mesh = with_vertex_normals(sphere())
    x, y, z = mesh.vertices.T
    heights = np.sin(5 * x + 1) * np.cos(4 * y) * np.cos(2 * z)
    border = np.unique(border_edges(mesh))
    heights[border] = 0
    return replace(mesh, vertices=mesh.vertices * (1 + amplitude * PIXEL * heights[:, None]))


def errors(mesh: TriangleMesh) -> np.ndarray:
    """Distance of the vertices well off the borders to the sphere, in pixels."""
    is_inner = np.abs(mesh.vertices[:, 2]) < 0.55
    return np.abs(np.linalg.norm(mesh.vertices[is_inner], axis=1) - 1) / PIXEL


@pytest.mark.slow
def test_bumps_that_photographs_do_not_show_go():
    before = bumpy(1.2)
    scores = []
    after = refined_mesh(before, views_of(pattern), lambda step, score: scores.append(score)).mesh
    assert np.median(errors(before)) > 0.3
    assert np.median(errors(after)) < 0.35 * np.median(errors(before))
    assert np.quantile(errors(after), 0.95) < 0.5 * np.quantile(errors(before), 0.95)
    assert len(scores) == len(REDUCTIONS)
    assert scores[-1] > scores[0]


@pytest.mark.slow
def test_borders_stay_where_they_are_and_topology_is_kept():
    before = bumpy(1.2)
    after = refined_mesh(before, views_of(pattern)).mesh
    border = np.unique(border_edges(before))
    assert (after.faces == before.faces).all()
    assert (after.vertices[border] == before.vertices[border]).all()


@pytest.mark.slow
def test_without_texture_a_surface_keeps_its_shape():
    before = bumpy(1.2)
    after = refined_mesh(before, views_of(lambda points: torch.full_like(points[..., 0], 0.5))).mesh
    moved = np.linalg.norm(after.vertices - before.vertices, axis=1) / PIXEL
    assert np.quantile(moved, 0.95) < 0.1


@pytest.mark.slow
def test_a_right_surface_stays():
    before = with_vertex_normals(sphere())
    after = refined_mesh(before, views_of(pattern)).mesh
    assert np.median(errors(after)) < 0.05


def test_gradients_of_vertices_point_to_the_surface():
    mesh = with_vertex_normals(bumpy(0.8))
    terms = vertex_terms(mesh, views_of(pattern), reduction=1)
    heights = np.linalg.norm(mesh.vertices, axis=1) - 1
    is_seen = (terms.n_compared > 5) & (np.abs(heights) > 0.3 * PIXEL)
    # A vertex that lies too far outside has to move inward: the disagreement grows outward.
    agrees = np.sign(terms.gradient[is_seen]) == np.sign(heights[is_seen])
    assert is_seen.sum() > 300
    assert agrees.mean() > 0.8
    assert (terms.curvature >= 0).all()


@pytest.mark.slow
def test_the_same_bits_for_any_number_of_threads():
    views = views_of(pattern)
    mesh = with_vertex_normals(bumpy(0.8))
    n_threads = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(refined_mesh(mesh, views).mesh.vertices)
    torch.set_num_threads(n_threads)
    assert (results[0] == results[1]).all()
