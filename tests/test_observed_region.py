# SPDX-License-Identifier: Apache-2.0
"""Surface that is left out because no point of the reconstruction is near, and pinholes closed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import pixel_rays
from gaussian_splatting.data.observations import Observations
from sugar_extractors.mesh.fusion.observed_region import MIN_OBSERVED as MIN_POINTS
from sugar_extractors.mesh.fusion.observed_region import (
    MIN_OBSERVING_VIEWS,
    observed_region,
    without_bare_border,
)
from sugar_extractors.mesh.fusion.tsdf import PLANE_FILL, PLANE_MARGIN, Fusion, TsdfConfig
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh, keep_vertices, topology, with_holes_filled
from sugar_utils.console import Console
from tests.support.mesh_scenes import cameras_around
from tests.support.random_scenes import look_at

EVERYWHERE = Box.cube(np.zeros(3), 100.0)


def observed(points, lengths=MIN_OBSERVING_VIEWS) -> Observations:
    n = len(points)
    counts = np.broadcast_to(lengths, n).astype(np.int32)
    return Observations(points.astype(np.float32), np.zeros(n, np.float32), counts, {})


def cube_of_points(n=400, seed=0) -> np.ndarray:
    """Points in the cube from -1 to 1, its corners among them."""
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
    return np.concatenate([corners, np.random.default_rng(seed).uniform(-1, 1, size=(n, 3))])


def test_region_is_the_convex_hull_and_a_margin():
    region = observed_region(observed(cube_of_points()), EVERYWHERE, 0.25)
    inside = np.array([[0, 0, 0], [1.24, 0, 0], [-1.24, 1.24, 1.24], [0, 0, -1.0]])
    outside = np.array([[1.26, 0, 0], [0, -1.3, 0], [50, 0, 0]])
    assert region.contains(inside).all()
    assert not region.contains(outside).any()


def test_points_of_two_views_and_points_outside_of_the_box_do_not_count():
    cube = cube_of_points()
    points = np.concatenate([cube, [[5.0, 0, 0]], [[0, 500.0, 0]]])
    lengths = np.full(len(points), MIN_OBSERVING_VIEWS)
    lengths[-2] = MIN_OBSERVING_VIEWS - 1
    region = observed_region(observed(points, lengths), EVERYWHERE, 0.0)
    assert not region.contains(np.array([[3.0, 0, 0], [0, 50, 0]])).any()
    seen = observed_region(observed(points), EVERYWHERE, 0.0)
    assert seen.contains(np.array([[3.0, 0, 0]])).all()


def test_too_little_is_no_region():
    flat = cube_of_points() * (1, 1, 0)
    for known in (None, observed(cube_of_points(0)[: MIN_POINTS - 1]), observed(flat)):
        assert observed_region(known, EVERYWHERE, 0.1) is None


def test_depth_of_a_dome_behind_the_scene_makes_no_surface():
    """Every view sees a sphere of radius 1, and beside it a plane 3 behind the middle."""

    def render(camera) -> DepthView:
        y, x = np.mgrid[: camera.height, : camera.width] + 0.5
        rays = np.stack(
            [(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, np.ones_like(x)], axis=-1
        )
        middle = camera.rotation @ np.zeros(3) + camera.translation
        a, b = (rays**2).sum(-1), rays @ middle
        root = b**2 - a * (middle @ middle - 1)
        depth = np.where(root > 0, (b - np.sqrt(np.maximum(root, 0))) / a, middle[2] + 3)
        color = torch.zeros(camera.height, camera.width, 3)
        depth = torch.tensor(depth, dtype=torch.float32)
        return DepthView(camera, depth, color, torch.ones_like(depth))

    cameras = cameras_around()
    config = TsdfConfig(tsdf_depth="plane", tsdf_voxel_size=0.08, min_component=10)
    box = Box.cube(np.zeros(3), 6.0)
    fusion = Fusion(render, cameras, box, config, Console.silent())
    everything = fusion.surface()
    region = observed_region(observed(cube_of_points() * 0.8), box, 0.3)
    near = fusion.surface(region)
    assert np.linalg.norm(everything.mesh.vertices, axis=1).max() > 2
    assert np.linalg.norm(near.mesh.vertices, axis=1).max() < 1.1
    assert near.mesh.n_faces > 1_000


def sheet(n=12) -> TriangleMesh:
    x, y = np.meshgrid(np.arange(n), np.arange(n))
    vertices = np.stack([x.ravel(), y.ravel(), np.zeros(n * n)], axis=1).astype(float)
    k = np.arange(n * n).reshape(n, n)[:-1, :-1].ravel()
    faces = np.concatenate([np.stack([k, k + 1, k + n], 1), np.stack([k + 1, k + n + 1, k + n], 1)])
    return TriangleMesh(vertices, faces, np.zeros((n * n, 3), dtype=np.uint8))


def test_views_count_by_their_weights():
    camera = cameras_around()[0]
    shape = camera.height, camera.width

    def render(view) -> DepthView:
        depth, weight = (2.0, 1.0) if view is camera else (2.1, 3.0)
        return DepthView(
            view, torch.full(shape, depth), torch.zeros(*shape, 3), torch.full(shape, weight)
        )

    config = TsdfConfig(tsdf_depth="plane", tsdf_voxel_size=0.05, min_component=1)
    views = [camera, replace(camera, name="other")]
    box = Box.cube(np.zeros(3), 6.0)
    mesh = Fusion(render, views, box, config, Console.silent()).surface().mesh
    depths = mesh.vertices @ camera.rotation[2] + camera.translation[2]
    assert np.median(depths) == pytest.approx(2.075, abs=2e-3)


CAMERAS = [look_at((0.01 * k, -0.4, 6.0), width=120, height=120, focal=150.0) for k in range(3)]


def largest(places):
    return places.abs().amax(dim=-1)


def seen_from_above(is_textured):
    """A render of the plane z = 0 with chequers at the places, (N, 2), that are textured."""

    def render(camera) -> DepthView:
        rays = pixel_rays(camera, dtype=torch.float64, device="cpu")
        directions = rays.reshape(-1, 3) @ torch.from_numpy(camera.rotation)
        center = torch.from_numpy(camera.center)
        depth = -center[2] / directions[:, 2]
        places = (center + depth[:, None] * directions)[:, :2]
        chequers = (places / 0.15).floor().sum(dim=-1) % 2
        grey = torch.where(is_textured(places), chequers, 0.0)
        depth = depth.reshape(camera.height, camera.width).float()
        color = grey.reshape(*depth.shape, 1).expand(-1, -1, 3).float()
        return DepthView(camera, depth, color, torch.ones_like(depth))

    return render


def cut_ground(is_textured, reach=0.1, min_faces=1, render=None):
    """A ground of half side 2 around points of half side 0.8, before and after the cut."""
    n = 81
    mesh = sheet(n)
    mesh = replace(mesh, vertices=(mesh.vertices - [40, 40, 0]) * 0.05)
    region = observed_region(observed(cube_of_points() * 0.8), EVERYWHERE, 0.0)
    render = render or seen_from_above(is_textured)
    return mesh, without_bare_border(mesh, region, render, CAMERAS, reach, min_faces)


def half_sides(mesh):
    return np.abs(mesh.vertices).max(axis=1)


@pytest.mark.parametrize("textured", [1.1, 1.5])
def test_a_ground_ends_where_its_texture_does(textured):
    mesh, cut = cut_ground(lambda places: largest(places) < textured)
    assert textured - 0.2 < half_sides(cut).max() < textured + 0.1
    inner = textured - 0.22
    assert (half_sides(cut) < inner).sum() == (half_sides(mesh) < inner).sum()


def test_a_ground_without_texture_stays_around_the_points():
    mesh, cut = cut_ground(lambda places: largest(places) < 0)
    assert half_sides(cut).max() == pytest.approx(0.8, abs=0.051)
    assert (half_sides(cut) < 0.79).sum() == (half_sides(mesh) < 0.79).sum()


def test_bare_surface_that_reaches_no_border_stays():
    mesh, cut = cut_ground(lambda places: (largest(places) - 1.2).abs() > 0.3)
    assert cut.n_faces == mesh.n_faces


def test_small_pieces_that_the_cut_separates_go_and_others_stay():
    """A square of half side 0.3 at (1.5, 1.5) has texture, too."""

    def is_textured(places):
        return (largest(places) < 1) | (largest(places - 1.5) < 0.3)

    both = cut_ground(is_textured)[1]
    assert half_sides(both).max() > 1.5
    one = cut_ground(is_textured, min_faces=200)[1]
    assert half_sides(one).max() < 1.1
    assert (half_sides(both) < 1).sum() == (half_sides(one) < 1).sum()
    mesh, whole = cut_ground(lambda places: largest(places) < 3, min_faces=10**6)
    assert whole.n_faces == mesh.n_faces


def test_a_surface_that_no_view_shows_stays():
    mesh, cut = cut_ground(lambda places: largest(places) < 1, reach=0.0)
    assert cut.n_faces == mesh.n_faces


def test_what_the_first_views_do_not_show_the_others_judge(monkeypatch):
    """Of three views, in turns of two, only the middle one shows the ground."""
    monkeypatch.setattr("sugar_extractors.mesh.fusion.observed_region.MAX_TEXTURE_VIEWS", 2)

    def is_textured(places):
        return largest(places) < 1

    shown = seen_from_above(is_textured)

    def render(camera) -> DepthView:
        view = shown(camera)
        return view if camera is CAMERAS[1] else replace(view, depth=view.depth * 0)

    _, cut = cut_ground(is_textured, render=render)
    assert half_sides(cut).max() < 1.1


def test_pinholes_are_closed_and_the_border_stays():
    whole = sheet()
    keep = np.ones(whole.n_vertices, dtype=bool)
    keep[[40, 90]] = False
    torn = keep_vertices(whole, keep)
    border = 4 * 11
    n_edges = (3 * torn.n_faces + border + 12) // 2
    assert topology(torn).open_edge_share == pytest.approx((border + 12) / n_edges)
    closed = with_holes_filled(torn, longest=8)
    n_edges = (3 * closed.n_faces + border) // 2
    assert topology(closed).open_edge_share == pytest.approx(border / n_edges)
    assert with_holes_filled(torn, longest=5) is torn
    assert topology(with_holes_filled(torn)).open_edge_share == 0


def test_both_act_on_multi_view_models_alone_unless_asked_for():
    plane, blended = TsdfConfig(tsdf_depth="plane"), TsdfConfig(tsdf_depth="blended")
    assert (plane.margin, plane.fill) == (PLANE_MARGIN, PLANE_FILL)
    assert (blended.margin, blended.fill) == (None, 0)
    assert replace(blended, tsdf_margin=0.2).margin == 0.2


def test_the_settings_of_a_mesh_are_recorded_as_they_act(tmp_path):
    def settings(**values) -> dict:
        options = MeshOptions(
            scene_path=tmp_path,
            checkpoint_path=tmp_path,
            mesh_extractor="tsdf",
            tsdf=TsdfConfig(**values),
        )
        return options.identity(0.3, 100)["tsdf"]

    assert settings()["tsdf_margin"] is None
    assert settings(tsdf_margin=0.1)["tsdf_margin"] == 0.1
    assert settings(tsdf_depth="plane")["tsdf_margin"] == PLANE_MARGIN
