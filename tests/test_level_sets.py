# SPDX-License-Identifier: Apache-2.0
"""Level sets of one view: recorded values, the torch twin, and directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.rasterization import rasterize
from sugar_extractors.mesh.level_sets import (
    LevelSetPoints,
    build_model,
    diamond_hits,
    march_rays,
    pixel_centers,
)
from sugar_scene.geometry import inverse_square_roots, neighbor_opacities, std_along_view
from sugar_scene.triangle_rasterizer import rasterize_camera_triangles
from tests.support.golden import golden_cameras, golden_cloud, load_golden

LEVELS = {"01": 0.1, "03": 0.3, "05": 0.5}


@pytest.fixture(scope="module")
def case():
    return load_golden("case07_level_set_A")


@pytest.fixture(scope="module")
def model(case):
    return build_model(golden_cloud(case).detached())


def upstream_grid(pixels: torch.Tensor, camera) -> torch.Tensor:
    """The recorded program's rays: pixel j at j m / (m - 1) with m the shorter side."""
    short = min(camera.width, camera.height)
    return (pixel_centers(pixels, camera.width) - 0.5) * short / (short - 1)


def rays_of(model, camera, coordinates=pixel_centers):
    hits = diamond_hits(model, camera)
    pixels = hits.covered.flatten().nonzero()[:, 0]
    coordinates = (
        pixel_centers(pixels, camera.width)
        if coordinates is pixel_centers
        else coordinates(pixels, camera)
    )
    return pixels, coordinates, hits.depth.flatten()[pixels], hits.face.flatten()[pixels] // 2


def march_reference(
    model, camera, coordinates, depths, gaussian, levels, n_samples=21, reach=3.0
) -> LevelSetPoints:
    """The same in plain float64 torch, storing every (ray, sample, neighbour)."""
    g = [t.double() for t in model.gaussians.tensors()[:4]]
    means, quats, scales, opacities = g
    rotation, center = torch.tensor(camera.rotation), torch.tensor(camera.center)
    gaussian = gaussian.long()
    principal = torch.tensor([camera.cx, camera.cy])
    focal = torch.tensor([camera.fx, camera.fy])
    xy = (coordinates.double() - principal) / focal
    ray = torch.cat([xy, torch.ones(len(xy), 1)], dim=1).double() @ rotation
    origin = center + ray * depths[:, None]
    ray = torch.nn.functional.normalize(ray, dim=-1)
    sigma = std_along_view(means, quats, scales, center)[gaussian]
    t = sigma[:, None] * torch.linspace(-reach, reach, n_samples, dtype=torch.float64)
    x = origin[:, None] + t[..., None] * ray[:, None]
    rows = model.neighbors[gaussian]

    def opacity(points, rows):
        return neighbor_opacities(points, rows, means, quats, scales, opacities)

    density = (
        opacity(x.reshape(-1, 3), rows.repeat_interleave(n_samples, 0))
        .sum(-1)
        .reshape(t.shape)
        .clamp_max(1)
    )
    out = []
    for level in levels:
        above = density > level
        k = above.int().argmax(dim=1)
        valid = (density[:, 0] < level) & (k > 0)
        k = k.clamp_min(1)[:, None]
        d0, d1 = density.gather(1, k - 1), density.gather(1, k)
        t0, t1 = t.gather(1, k - 1), t.gather(1, k)
        point = origin + (t0 + (level - d0) / (d1 - d0) * (t1 - t0)) * ray
        root = inverse_square_roots(quats, scales)[rows.long()]
        offset = (point[:, None] - means[rows.long()])[..., None]
        slope = (root @ (root.transpose(2, 3) @ offset)).squeeze(-1)
        normal = (opacity(point, rows)[..., None] * slope).sum(1)
        out.append((point, torch.nn.functional.normalize(normal, dim=-1), valid))
    return LevelSetPoints(*(torch.stack(parts) for parts in zip(*out, strict=True)))


def test_only_opaque_gaussians_survive_with_their_neighbours(case, model):
    assert len(model) == case["in_points"].shape[0]
    assert np.array_equal(model.neighbors.numpy(), case["out_knn_idx"])


@pytest.mark.parametrize("view", [0, 2])
def test_nearest_diamonds_are_the_recorded_ones(case, model, view):
    camera = golden_cameras(case)[view]
    hits = diamond_hits(model, camera)
    gaussian = torch.where(hits.covered, hits.face // 2, -1).numpy()
    recorded = case[f"out_cam{view}_diamond_gaussian"]
    assert (gaussian == recorded).mean() >= 0.995
    same = (gaussian == recorded) & (recorded >= 0)
    np.testing.assert_allclose(
        hits.depth.numpy()[same], case[f"out_cam{view}_diamond_depth"][same], rtol=2e-5
    )


@pytest.mark.parametrize("prefix", ["out", "alt_pixelcentre"])
@pytest.mark.parametrize("view", [0, 2])
def test_points_normals_and_pixels_are_the_recorded_ones(case, model, view, prefix):
    camera = golden_cameras(case)[view]
    grid = upstream_grid if prefix == "out" else pixel_centers
    names = LEVELS if prefix == "out" else ["03"]
    pixels, coordinates, depths, gaussian = rays_of(model, camera, grid)
    found = march_rays(
        model, camera, coordinates, depths, gaussian, [LEVELS[name] for name in names]
    )
    color = rasterize(model.gaussians, camera, sh_degree=0).image.clamp(0, 1).reshape(-1, 3)
    for index, name in enumerate(names):
        key = f"{prefix}_cam{view}_lv{name}"
        valid = found.valid[index]
        own_pixels = pixels[valid].numpy()
        common, mine, theirs = np.intersect1d(
            own_pixels, case[f"{key}_pixel_idx"], return_indices=True
        )
        assert len(common) >= 0.995 * max(len(own_pixels), len(case[f"{key}_pixel_idx"]))
        same = gaussian[valid].numpy()[mine] == case[f"{key}_gaussian_idx"][theirs]
        assert same.mean() > 0.995
        mine, theirs = mine[same], theirs[same]
        points = found.points[index, valid].numpy()[mine]
        normals = -found.normals[index, valid].numpy()[mine]  # recorded ones point inward
        error = np.abs(points - case[f"{key}_points"][theirs]).max(axis=1)
        assert (error < 1e-4).mean() > 0.998
        cosine = (normals * case[f"{key}_normals"][theirs]).sum(axis=1)
        assert (cosine > 0.999).mean() > 0.998
        np.testing.assert_allclose(
            color[pixels[valid][mine]].numpy(), case[f"{key}_colors"][theirs], atol=6e-3
        )


def test_marching_equals_its_float64_twin(case, model):
    camera = golden_cameras(case)[1]
    pixels, coordinates, depths, gaussian = rays_of(model, camera)
    arguments = (model, camera, coordinates, depths, gaussian, [0.05, 0.3, 0.9])
    mine = march_rays(*arguments)
    twin = march_reference(*arguments)
    assert (mine.valid != twin.valid).float().mean() < 2e-3
    both = mine.valid & twin.valid
    assert both.any()
    error = (mine.points - twin.points)[both].abs().amax(-1)
    assert (error < 2e-5).float().mean() > 0.995
    cosine = (mine.normals * twin.normals)[both].sum(-1)
    assert (cosine > 0.9999).float().mean() > 0.99
    assert (mine.points[~mine.valid] == 0).all()
    assert len(pixels) > 1000


def test_billboards_lie_in_the_plane_across_the_line_of_sight(case, model):
    camera = golden_cameras(case)[0]
    rotation = torch.tensor(camera.rotation).float()
    translation = torch.tensor(camera.translation).float()
    center = model.gaussians.means @ rotation.T + translation
    corner = model.corners.reshape(-1, 4, 3) @ rotation.T + translation
    unit = torch.nn.functional.normalize(center, dim=-1)[:, None]
    moved = corner * (center[:, None] * unit).sum(-1, True) / (corner * unit).sum(-1, True)
    moved[(corner * unit).sum(-1) <= 0] = torch.nan
    reference = rasterize_camera_triangles(moved.reshape(-1, 3), model.faces, camera)
    hits = diamond_hits(model, camera)
    assert (reference.face == hits.face).float().mean() > 0.999


def test_normals_point_out_of_the_object():
    # One opaque Gaussian: outward is away from its centre, towards the camera.
    cloud = GaussianCloud(
        means=torch.zeros(1, 3),
        sh_dc=torch.zeros(1, 1, 3),
        sh_rest=torch.zeros(1, 15, 3),
        opacity_logits=torch.full((1, 1), 3.0),
        log_scales=torch.full((1, 3), -1.0),
        quats=torch.tensor([[1.0, 0, 0, 0]]),
    )
    case = load_golden("case07_level_set_A")
    camera = golden_cameras(case)[0]
    model = build_model(cloud)
    _, coordinates, depths, gaussian = rays_of(model, camera)
    found = march_rays(model, camera, coordinates, depths, gaussian, [0.3])
    assert found.valid.any()
    points, normals = found.points[found.valid], found.normals[found.valid]
    torch.testing.assert_close(normals, torch.nn.functional.normalize(points, dim=-1))
    assert ((torch.tensor(camera.center).float() - points) * normals).sum(-1).min() > 0


def test_a_model_without_opaque_gaussians_sees_nothing(case):
    cloud = golden_cloud(case).detached()
    cloud.opacity_logits.fill_(-1.0)
    model = build_model(cloud)
    assert len(model) == 0
    assert not diamond_hits(model, golden_cameras(case)[0]).covered.any()


def test_threads_do_not_change_bits(case, model):
    camera = golden_cameras(case)[0]
    _, coordinates, depths, gaussian = rays_of(model, camera)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(march_rays(model, camera, coordinates, depths, gaussian, [0.3]))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
