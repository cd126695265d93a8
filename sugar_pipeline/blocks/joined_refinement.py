# SPDX-License-Identifier: Apache-2.0
"""The refined parts of all blocks as one: vertices at borders are where both blocks agree on them.

A refinement moves vertices, and two blocks move the vertices between them to two places. The mean
of both closes the surface again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from sugar_extractors.results import read_state
from sugar_pipeline.blocks.block_plan import Block
from sugar_pipeline.blocks.block_refinement import require_same_faces
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_scene import triangle_mesh
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.device import float32_tensor


@dataclass(frozen=True)
class RefinedPart:
    """A refined block: its part of the mesh before the refinement, and the files after it."""

    block: Block
    mesh: TriangleMesh
    model: Path  # its refined ``.pt``
    textured: Path | None  # its OBJ; None where none was wanted

    @classmethod
    def of(cls, block: Block, mesh: TriangleMesh, stages: PipelinePlan) -> RefinedPart | None:
        """Return the part of a block; None where it has no surface, or is not refined."""
        if stages.refine is None or mesh.n_faces == 0:
            return None
        textured = None if stages.texture is None else stages.texture.obj_path
        return cls(block, mesh, stages.refine.result, textured)

    def read_cloud(self, vertices: np.ndarray | None = None) -> BoundCloud:
        """Read the refined model of the block without its surroundings.

        Args:
            vertices: In place of its own, (V, 3) world units; None for those.

        Raises:
            UserError: It is of another mesh.
        """
        cloud = read_state(self.model, bound_cloud_from_state)
        n_faces = self.mesh.n_faces
        require_same_faces(n_faces, len(cloud.faces), self.model)
        if vertices is None:
            vertices = cloud.vertices[: self.mesh.n_vertices].double().numpy()
        background = cloud.background
        if background is not None:
            background = _inside(self.block, background)
        cloud = cloud.with_triangles(torch.arange(n_faces, device="cpu"))
        return replace(cloud, vertices=float32_tensor(vertices), background=background)

    def read_textured(self, vertices: np.ndarray) -> TexturedMesh:
        """Read the textured mesh of the block without its surroundings, at other vertices.

        Raises:
            UserError: It is of another mesh.
            ValueError: The block has none.
        """
        if self.textured is None:
            raise ValueError(f"block {self.block.number} has no texture")
        mesh = read_textured_mesh(self.textured)
        n_faces = self.mesh.n_faces
        require_same_faces(n_faces, mesh.n_faces, self.textured)
        return replace(
            mesh,
            vertices=float32_tensor(vertices),
            faces=mesh.faces[:n_faces],
            uvs=mesh.uvs[:n_faces],
        )


def agreed_vertices(parts: Sequence[RefinedPart]) -> list[np.ndarray]:
    """Return the refined vertices of each part; shared vertices get their mean position.

    (V, 3) float64 world units each
    """
    refined = [part.read_cloud().vertices.double().numpy() for part in parts]
    return with_shared_means([part.mesh for part in parts], refined)


def with_shared_means(
    meshes: Sequence[TriangleMesh], refined: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return vertices; those that several meshes share get their mean position.

    Args:
        meshes: Before the refinement; they share the vertices of equal places on their borders.
        refined: The vertices of each mesh after it. (V, 3)
    """
    borders = [np.unique(triangle_mesh.border_edges(mesh)) for mesh in meshes]
    before = [mesh.vertices[rows] for mesh, rows in zip(meshes, borders, strict=True)]
    after = [vertices[rows] for vertices, rows in zip(refined, borders, strict=True)]
    _, numbers, counts = np.unique(
        np.concatenate(before), axis=0, return_inverse=True, return_counts=True
    )
    numbers = numbers.reshape(-1)
    sums = np.zeros((len(counts), 3))
    np.add.at(sums, numbers, np.concatenate(after))
    means = (sums / counts[:, None])[numbers]
    result = []
    ends = np.cumsum([len(rows) for rows in borders])
    for vertices, rows, of_part in zip(refined, borders, np.split(means, ends[:-1]), strict=True):
        moved = vertices.copy()
        moved[rows] = of_part
        result.append(moved)
    return result


def _inside(block: Block, cloud: GaussianCloud) -> GaussianCloud | None:
    """Return the Gaussians whose centres lie in a block; None if none do."""
    is_inside = torch.from_numpy(block.box.contains(cloud.means.double().numpy()))
    return cloud.select(is_inside) if bool(is_inside.any()) else None
