# SPDX-License-Identifier: Apache-2.0
"""Surfaces on Delaunay tetrahedra: closed, oriented, on both sides of thin parts, and exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.spatial import Delaunay, cKDTree

from sugar_extractors.mesh.fusion.marching_tetrahedra import (
    CrossedEdges,
    PointSamples,
    crossed_edges,
    crossings,
)
from sugar_extractors.mesh.fusion.tetrahedra import Pairs, TetrahedraFusion, pair_corners, thinned
from sugar_extractors.mesh.fusion.tsdf import Fusion, TsdfConfig
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh, doubled_area_normals, topology
from sugar_utils.console import Console
from tests.support.mesh_scenes import cameras_around, flat_gaussians, sphere_points
from tests.test_depth_fusion import RADIUS, ellipsoid_view

VOXEL = 0.03


def samples_of(distances: np.ndarray, is_known: np.ndarray | None = None) -> PointSamples:
    if is_known is None:
        is_known = np.ones(len(distances), dtype=bool)
    return PointSamples(distances, is_known, np.zeros((len(distances), 3)))


def sphere_field(points: np.ndarray) -> PointSamples:
    radii = np.linalg.norm(points, axis=1)
    return samples_of(radii - 1)


def random_tetrahedra(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random points and their Delaunay tetrahedra, in random orientation."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-2, 2, size=(1_500, 3))
    tetrahedra = Delaunay(points).simplices.astype(np.int64)
    is_turned = rng.random(len(tetrahedra)) < 0.5
    tetrahedra[is_turned] = tetrahedra[is_turned][:, [1, 0, 2, 3]]
    return points, tetrahedra


def mesh_between(points: np.ndarray, edges: CrossedEdges, n_rounds: int) -> TriangleMesh:
    samples = sphere_field(points)
    crossing = crossings(sphere_field, points, samples, edges, n_rounds)
    colors = np.zeros(crossing.points.shape, np.uint8)
    return TriangleMesh(crossing.points, edges.faces, colors)


def test_a_sphere_becomes_one_closed_surface_that_faces_outward():
    points, tetrahedra = random_tetrahedra()
    samples = sphere_field(points)
    edges = crossed_edges(points, tetrahedra, samples.is_inside)
    mesh = mesh_between(points, edges, n_rounds=12)
    shape = topology(mesh)
    assert shape.components == 1
    assert shape.open_edge_share == 0
    assert shape.non_manifold_edge_share == 0
    n_edges = 3 * mesh.n_faces // 2
    assert mesh.n_vertices - n_edges + mesh.n_faces == 2
    starts = mesh.faces.ravel()
    ends = np.roll(mesh.faces, -1, axis=1).ravel()
    assert len(np.unique(starts * mesh.n_vertices + ends)) == 3 * mesh.n_faces
    middles = mesh.vertices[mesh.faces].mean(axis=1)
    normals = doubled_area_normals(mesh.vertices, mesh.faces)
    six_volumes = (normals * middles).sum(axis=1)
    volume = six_volumes.sum() / 6
    assert volume == pytest.approx(4 / 3 * np.pi, rel=0.1)


@pytest.mark.parametrize("case", range(16))
def test_every_case_of_a_tetrahedron_separates_its_corners(case):
    points = np.array([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)], dtype=np.float64)
    is_inside = (case >> np.arange(4)) & 1 == 1
    for corners in ([0, 1, 2, 3], [1, 0, 2, 3]):
        edges = crossed_edges(points, np.array([corners]), is_inside)
        n_inside = int(is_inside.sum())
        assert len(edges.inner) == n_inside * (4 - n_inside)
        assert len(edges.faces) == {0: 0, 1: 1, 2: 2, 3: 1, 4: 0}[n_inside]
        assert is_inside[edges.inner].all()
        assert not is_inside[edges.outer].any()
        middles = (points[edges.inner] + points[edges.outer]) / 2
        outside = points[~is_inside]
        inside = points[is_inside]
        ways = outside[:, None] - inside
        for normal in doubled_area_normals(middles, edges.faces):
            heights = ways @ normal
            assert heights.min() > -1e-12
            assert heights.max() > 0


def test_halving_finds_the_surface_between_distant_corners():
    points, tetrahedra = random_tetrahedra()
    samples = sphere_field(points)
    edges = crossed_edges(points, tetrahedra, samples.is_inside)

    def largest_error(n_rounds: int) -> float:
        mesh = mesh_between(points, edges, n_rounds)
        radii = np.linalg.norm(mesh.vertices, axis=1)
        return float(np.abs(radii - 1).max())

    first = largest_error(0)
    assert first > 0.02
    assert largest_error(3) < first / 8
    assert largest_error(12) < 1e-6


def test_a_crossing_into_the_unknown_is_told():
    """Behind x = 0.5 nothing is known: that is not where a surface is."""
    points = np.array([[0.0, 0, 0], [1.0, 0, 0]])
    edges = CrossedEdges(np.array([1]), np.array([0]), np.zeros((0, 3), np.int64))

    def free_space(places: np.ndarray) -> PointSamples:
        return samples_of(np.ones(len(places)), places[:, 0] < 0.5)

    def surface(places: np.ndarray) -> PointSamples:
        return samples_of(0.4 - places[:, 0], places[:, 0] < 0.8)

    samples = free_space(points)
    crossing = crossings(free_space, points, samples, edges, 8)
    assert not crossing.is_known[0]
    samples = surface(points)
    crossing = crossings(surface, points, samples, edges, 8)
    assert crossing.is_known[0]
    assert crossing.points[0] == pytest.approx([0.4, 0, 0], abs=1e-6)


def test_no_tetrahedra_give_no_triangles():
    points = np.zeros((0, 3))
    tetrahedra = np.zeros((0, 4), np.int64)
    is_inside = np.zeros(0, bool)
    edges = crossed_edges(points, tetrahedra, is_inside)
    assert len(edges.inner) == 0
    assert edges.faces.shape == (0, 3)


def test_corners_lie_on_both_sides_and_along_what_is_long():
    # The thin axis is z, then come x and y.
    columns = np.eye(3)[:, [2, 0, 1]]
    axes = np.stack([columns, columns])
    disc = [1e-4, 0.5, 0.5]
    strip = [1e-4, 4.0, 0.5]
    scales = np.array([disc, strip])
    means = np.zeros((2, 3))
    pairs = pair_corners(means, axes, scales, voxel=1.0)
    for corners, side in ((pairs.upper, 1), (pairs.lower, -1)):
        assert (side * corners[:, 2] > 0).all()
        assert (side * corners[:, 2] < 0.5).all()
        assert sorted(corners[:, 0].round(6)) == [-6.0, 0, 0, 6.0]


def test_too_many_corners_are_thinned_evenly():
    rng = np.random.default_rng(2)
    places = rng.uniform(size=(3_000, 3))
    pairs = Pairs(places + 1e-3, places - 1e-3)
    assert thinned(pairs, 0.01, 3_000) is pairs
    fewer = thinned(pairs, 0.01, 500)
    assert 200 < len(fewer.upper) <= 500
    assert np.allclose(fewer.upper - fewer.lower, 2e-3)
    middles = (fewer.upper + fewer.lower) / 2
    distances, _ = cKDTree(middles).query(places)
    assert distances.max() < 0.3


def disc_gaussians(thickness: float):
    """Flat Gaussians on both sides of a disc."""
    rng = np.random.default_rng(1)
    places = rng.uniform(-RADIUS, RADIUS, size=(4_000, 2))
    distances = np.linalg.norm(places, axis=1)
    is_used = distances < 0.9 * RADIUS
    places = places[is_used]
    shares = distances[is_used] / RADIUS
    heights = thickness / 2 * np.sqrt(1 - shares**2)
    heights *= rng.choice([-1, 1], size=len(places))
    points = np.column_stack([places, heights])
    normals = np.zeros(points.shape)
    normals[:, 2] = 1
    colors = np.full(points.shape, 0.5)
    return flat_gaussians(points, normals, colors, 0.02, 0.9)


def fused(cloud, render):
    settings = TsdfConfig(tsdf_voxel_size=VOXEL, min_component=10)
    box = Box.cube(np.zeros(3), 1.2)
    fusion = Fusion(render, cameras_around(24), box, settings, Console())
    gaussians = cloud.detached().activate()
    return TetrahedraFusion(fusion, gaussians).surface().mesh


def gaussians_of_sphere(radius: float):
    points = sphere_points(3_000)
    colors = np.full(points.shape, 0.5)
    return flat_gaussians(radius * points, points, colors, 0.03, 0.9)


@pytest.fixture(scope="module")
def sphere():
    return fused(gaussians_of_sphere(RADIUS), ellipsoid_view)


@pytest.mark.slow
def test_views_of_a_sphere_become_a_closed_sphere(sphere):
    radii = np.linalg.norm(sphere.vertices, axis=1)
    errors = np.abs(radii - RADIUS)
    assert errors.mean() < 0.1 * VOXEL
    assert errors.max() < VOXEL
    shape = topology(sphere)
    assert shape.open_edge_share == 0
    assert shape.components == 1
    assert (sphere.colors == 255).all()  # of the views


@pytest.mark.slow
def test_gaussians_below_the_surface_give_corners_outside():
    cloud = gaussians_of_sphere(RADIUS - 2 * VOXEL)
    mesh = fused(cloud, ellipsoid_view)
    radii = np.linalg.norm(mesh.vertices, axis=1)
    assert len(radii) > 1_000
    assert np.abs(radii - RADIUS).max() < VOXEL


@pytest.mark.slow
def test_a_disc_thinner_than_a_voxel_has_both_sides():
    thickness = 0.8 * VOXEL
    half_axes = (RADIUS, RADIUS, thickness / 2)
    cloud = disc_gaussians(thickness)
    render = partial(ellipsoid_view, half_axes=half_axes)
    mesh = fused(cloud, render)
    distances = np.linalg.norm(mesh.vertices[:, :2], axis=1)
    is_central = distances < 0.5 * RADIUS
    faces = mesh.faces[is_central[mesh.faces].all(axis=1)]
    normals = doubled_area_normals(mesh.vertices, faces)
    heights = mesh.vertices[faces, 2].mean(axis=1)
    area = np.pi * (0.5 * RADIUS) ** 2
    for side in (1, -1):
        is_side = side * normals[:, 2] > 0
        side_area = np.abs(normals[is_side, 2]).sum() / 2
        assert side_area > 0.85 * area
        errors = side * heights[is_side] - thickness / 2
        assert np.abs(errors).mean() < 0.4 * VOXEL


def test_a_box_without_gaussians_has_no_surface():
    cloud = disc_gaussians(0.1)
    gaussians = cloud.detached().activate()
    center = np.ones(3)
    box = Box.cube(center, 0.1)
    settings = TsdfConfig(tsdf_voxel_size=VOXEL)
    fusion = Fusion(ellipsoid_view, cameras_around(6), box, settings, Console())
    region = TetrahedraFusion(fusion, gaussians).surface()
    assert region.mesh.n_faces == 0
    assert region.n_voxels == 0


def test_views_without_depth_give_no_surface():
    def blank(camera):
        view = ellipsoid_view(camera)
        return replace(view, depth=torch.zeros_like(view.depth))

    assert fused(disc_gaussians(0.1), blank).n_faces == 0
