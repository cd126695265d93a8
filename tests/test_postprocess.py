# SPDX-License-Identifier: Apache-2.0
"""Peeling of border triangles."""

from __future__ import annotations

import pytest
import torch

from sugar_extractors.texture.border_peeling import face_density, interior_faces, kept_faces
from sugar_scene.mesh_bound import bind_to_mesh
from tests.support.mesh_scenes import icosahedron


def grid(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n x n squares of two triangles. Vertices and faces"""
    y, x = torch.meshgrid(torch.arange(n + 1), torch.arange(n + 1), indexing="ij")
    vertices = torch.stack([x, y, 0 * x], dim=-1).reshape(-1, 3).float()
    rows = torch.arange((n + 1) ** 2).reshape(n + 1, n + 1)
    a, b, c, d = rows[:-1, :-1], rows[:-1, 1:], rows[1:, 1:], rows[1:, :-1]
    faces = torch.stack([torch.stack([a, b, c], -1), torch.stack([a, c, d], -1)], dim=2)
    return vertices, faces.reshape(-1, 3)


def peeled_by_hand(faces: torch.Tensor, iterations: int) -> list[int]:
    left = list(range(len(faces)))
    for _ in range(iterations):
        count: dict = {}
        for f in left:
            for k in range(3):
                edge = frozenset((int(faces[f, k]), int(faces[f, (k + 1) % 3])))
                count[edge] = count.get(edge, 0) + 1
        left = [
            f
            for f in left
            if all(
                count[frozenset((int(faces[f, k]), int(faces[f, (k + 1) % 3])))] >= 2
                for k in range(3)
            )
        ]
    return left


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_rings_are_peeled_off(iterations):
    _, faces = grid(9)
    faces = faces[torch.randperm(len(faces), generator=torch.Generator().manual_seed(0))]
    kept = interior_faces(faces, iterations).nonzero()[:, 0].tolist()
    assert kept == peeled_by_hand(faces, iterations)
    assert (len(kept) < len(faces)) == (iterations > 0)


def test_closed_meshes_have_no_border():
    assert interior_faces(torch.from_numpy(icosahedron().faces), 5).all()


def test_everything_may_be_peeled_off():
    assert not interior_faces(torch.tensor([[0, 1, 2], [1, 2, 3]]), 1).any()
    assert interior_faces(torch.zeros(0, 3, dtype=torch.long), 3).shape == (0,)


def test_vertex_numbers_past_two_to_the_24_are_told_apart():
    big = (1 << 24) + 1
    # In float32 these corners fall together in pairs, and every edge would look shared.
    faces = torch.tensor([[0, big, 5], [0, big - 1, 5]])
    assert not interior_faces(faces, 1).any()


def test_dense_border_faces_come_back():
    _, faces = grid(6)
    inner = interior_faces(faces, 1)
    asked = []

    def density(rows):
        asked.append(rows)
        return torch.where(rows % 2 == 0, 0.5, 0.1)

    keep = kept_faces(faces, density, iterations=1, threshold=0.1)
    assert torch.equal(asked[0], (~inner).nonzero()[:, 0])
    even = torch.arange(len(faces)) % 2 == 0
    assert torch.equal(keep, inner | even)


@pytest.mark.parametrize("per_triangle", [1, 6])
def test_density_is_that_of_the_gaussians_at_the_centre(per_triangle):
    vertices, faces = grid(4)
    cloud = bind_to_mesh(vertices, faces, torch.ones(len(vertices), 3), per_triangle, 1.0)
    cloud.opacity_logits[:] = -2.0
    cloud.opacity_logits[: 8 * per_triangle] = 3.0
    density = face_density(cloud)(torch.arange(len(faces)))
    gaussians = cloud.activate()
    centers = vertices[faces].mean(dim=1)
    square = ((centers[:, None] - gaussians.means) / gaussians.scales[:, 1][None, :, None]) ** 2
    dense = (gaussians.opacities * torch.exp(-0.5 * square.sum(dim=-1))).sum(dim=1)
    torch.testing.assert_close(density, dense, rtol=2e-2, atol=2e-3)
    assert density[:6].min() > density[10:].max()
    assert face_density(cloud)(torch.arange(0)).shape == (0,)
