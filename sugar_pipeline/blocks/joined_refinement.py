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

from gaussian_splatting.cloud import GaussianCloud
from sugar_extractors.results import read_state
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_pipeline.blocks.block_plan import Block
from sugar_pipeline.blocks.block_refinement import require_same_faces
from sugar_pipeline.plan import PipelinePlan
from sugar_scene import triangle_mesh
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.mesh_bound import BoundCloud


@dataclass(frozen=True)
class RefinedPart:
    """The files of a refined block."""

    block: Block
    model: Path  # its refined ``.pt``
    textured: Path | None  # its OBJ; None where none was wanted

    @classmethod
    def of(cls, block: Block, stages: PipelinePlan) -> RefinedPart | None:
        """Return the part of a block; None where it has no surface."""
        if stages.refine is None or triangle_mesh.read_mesh_ply(block.mesh).n_faces == 0:
            return None
        textured = None if stages.texture is None else stages.texture.obj_path
        return cls(block, stages.refine.result, textured)

    def read_cloud(self) -> BoundCloud:
        """Read the refined model."""
        return read_state(self.model, bound_cloud_from_state)


@dataclass(frozen=True)
class SharedVertices:
    """Places of the vertices that several blocks have, before and after the refinement."""

    before: np.ndarray  # distinct, in lexicographic order. (S, 3) world units
    after: np.ndarray  # mean of all blocks that have them. (S, 3)

    def moved(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return refined vertices, those that are shared where all blocks have them.

        Args:
            before: The vertices before the refinement. (V, 3)
            after: And after it. (V, 3)
        """
        if len(self.before) == 0:
            return after
        everything = np.concatenate([self.before, before])
        _, numbers = np.unique(everything, axis=0, return_inverse=True)
        numbers = numbers.reshape(-1)
        place_of = np.full(numbers.max() + 1, -1)
        place_of[numbers[: len(self.before)]] = np.arange(len(self.before))
        rows = place_of[numbers[len(self.before) :]]
        return np.where((rows >= 0)[:, None], self.after[rows], after)


def shared_vertices(parts: Sequence[RefinedPart]) -> SharedVertices:
    """Return the vertices on the borders of blocks, with the means of their refined places."""
    before = [np.zeros((0, 3))]
    after = [np.zeros((0, 3))]
    for part in parts:
        mesh = triangle_mesh.read_mesh_ply(part.block.mesh)
        rows = np.unique(triangle_mesh.border_edges(mesh))
        before.append(mesh.vertices[rows])
        after.append(part.read_cloud().vertices[rows].double().numpy())
    places = np.concatenate(after)
    distinct, numbers, counts = np.unique(
        np.concatenate(before), axis=0, return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(distinct), 3))
    np.add.at(sums, numbers.reshape(-1), places)
    is_shared = counts > 1
    return SharedVertices(distinct[is_shared], (sums / counts[:, None])[is_shared])


def refined_part(part: RefinedPart, shared: SharedVertices) -> BoundCloud:
    """Return the refined model of a block alone, with its border where its neighbours have it."""
    mesh = triangle_mesh.read_mesh_ply(part.block.mesh)
    cloud = part.read_cloud()
    require_same_faces(mesh.n_faces, len(cloud.faces), part.model)
    after = cloud.vertices[: mesh.n_vertices].double().numpy()
    vertices = shared.moved(mesh.vertices, after)
    n_own = mesh.n_faces * cloud.per_triangle
    background = cloud.background
    if background is not None:
        background = _inside(part.block, background)
    return BoundCloud(
        vertices=torch.from_numpy(vertices.astype(np.float32)),
        sh_dc=cloud.sh_dc[:n_own],
        sh_rest=cloud.sh_rest[:n_own],
        opacity_logits=cloud.opacity_logits[:n_own],
        log_scales=cloud.log_scales[:n_own],
        rotations=cloud.rotations[:n_own],
        faces=cloud.faces[: mesh.n_faces],
        thickness=cloud.thickness,
        background=background,
        antialiased=cloud.antialiased,
    )


def textured_part(part: RefinedPart, cloud: BoundCloud) -> TexturedMesh:
    """Return the textured mesh of a block alone.

    Args:
        cloud: Of :func:`refined_part`.

    Raises:
        UserError: The textured mesh is of another refinement.
        ValueError: The part has none.
    """
    if part.textured is None:
        raise ValueError(f"block {part.block.number} has no texture")
    mesh = read_textured_mesh(part.textured)
    n_own = len(cloud.faces)
    require_same_faces(n_own, mesh.n_faces, part.textured)
    return replace(mesh, vertices=cloud.vertices, faces=mesh.faces[:n_own], uvs=mesh.uvs[:n_own])


def _inside(block: Block, cloud: GaussianCloud) -> GaussianCloud | None:
    """Return the Gaussians whose centres lie in a block; None if none do."""
    is_inside = torch.from_numpy(block.box.contains(cloud.means.double().numpy()))
    return cloud.select(is_inside) if bool(is_inside.any()) else None
