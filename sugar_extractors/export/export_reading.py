# SPDX-License-Identifier: Apache-2.0
"""Read the result of an export, to where the export starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_points
from gaussian_splatting.formats.packing import require_gaussians
from gaussian_splatting.formats.placement import note_unknown
from sugar_extractors.export.engines.levels import coarser_levels
from sugar_extractors.export.export_placement import ExportPlacement
from sugar_extractors.export.formats import readable_suffixes
from sugar_extractors.export.mesh_and_gaussians import mesh_and_gaussians_of
from sugar_extractors.export.point_clouds import read_points
from sugar_extractors.export.reading import (
    has_gaussians,
    open_gaussians,
    open_textured_mesh,
    read_bound_gaussians,
)
from sugar_extractors.export.reposing import read_edited, reposed
from sugar_extractors.export_contents import (
    CombinedContent,
    GaussianContent,
    MeshContent,
    PointCloud,
    moved_mesh,
)
from sugar_extractors.texture.mesh_reduction import simplified
from sugar_scene.mesh_bound import BoundCloud
from sugar_utils.errors import UserError


@dataclass(frozen=True)
class ResultFiles:
    """The files of a result; the kind of the format chooses what is read of them."""

    placement: ExportPlacement

    def gaussians(self) -> GaussianContent:
        """Read Gaussians; for ``--repose``, those of a refined model on its edited mesh."""
        options = self.placement.options
        bound = None
        if options.repose is not None:
            bound = read_bound_gaussians(options.result)
            cloud = self._reposed(bound)
        elif not has_gaussians(options.file):
            raise UserError(
                f"{options.file}: holds no Gaussians, which are read from {readable_suffixes()}; "
                "choose --to glb or obj for a mesh"
            )
        else:
            cloud, _ = open_gaussians(options.file, self.placement.notify)
        require_gaussians(options.file, cloud)
        content = GaussianContent(cloud, bound)
        return content.moved(self.placement.to_start(self.placement.source))

    def _reposed(self, bound: BoundCloud) -> GaussianCloud:
        """Return the Gaussians of a refined model on its edited mesh, where that mesh stands."""
        notify = self.placement.notify
        source = self.placement.source
        path = self.placement.main_file
        note_unknown(path, source, notify)
        edited = read_edited(path, bound, notify, source.offset)
        vertices = moved_points(edited.vertices.numpy(), source.to_scene())
        cloud = reposed(bound, torch.from_numpy(vertices))
        if edited.triangles is not None:
            n_deleted = len(bound.faces) - len(edited.triangles)
            notify(f"{n_deleted:,} triangles are left out with their Gaussians")
            cloud = cloud.with_triangles(edited.triangles)
        return GaussianContent(cloud.to_gaussians()).moved(source.matrix).cloud

    def mesh(self) -> MeshContent:
        """Read the levels of detail of a textured mesh.

        There is one level unless more are wanted. The first is simplified where that is wanted.
        """
        options = self.placement.options
        path = options.file
        if path.suffix.lower() != ".obj":
            raise UserError(f"{path}: --to {options.to} needs the textured .obj of a refined model")
        mesh, _ = open_textured_mesh(path, self.placement.notify)
        mesh = moved_mesh(mesh, self.placement.to_start(self.placement.source))
        finest = mesh
        normal_map = options.normal_map
        if options.max_triangles is not None or options.texture_size is not None:
            is_reduced = options.max_triangles is not None
            finest = simplified(
                mesh, options.max_triangles, options.texture_size, normal_map and is_reduced
            )
        if options.engines.lods is None:
            return MeshContent(mesh, (finest,))
        coarser = coarser_levels(mesh, finest, options.engines.lods, normal_map)
        return MeshContent(mesh, (finest, *coarser))

    def combined(self) -> CombinedContent:
        """Read a textured mesh and its Gaussians."""
        options = self.placement.options
        path = mesh_and_gaussians_of(options.result, options.gaussians).gaussians
        if not has_gaussians(path):
            raise UserError(f"{path}: holds no Gaussians; pass others as --gaussians")
        cloud, standing = open_gaussians(path, self.placement.notify)
        require_gaussians(path, cloud)
        return CombinedContent(self.mesh(), cloud, self.placement.to_start(standing))

    def points(self) -> PointCloud:
        """Read the vertices of a mesh or the centres of Gaussians."""
        points = read_points(self.placement.options.file, self.placement.notify)
        return points.moved(self.placement.to_start(self.placement.source))
