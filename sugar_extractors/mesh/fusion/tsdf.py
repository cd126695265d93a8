# SPDX-License-Identifier: Apache-2.0
"""Mesh extraction by fusing rendered depth into a truncated signed distance field.

The field (Curless and Levoy, SIGGRAPH 1996) lives in blocks of voxels near the surface only. The
first of two passes over the views finds the blocks that some depth reaches, the second averages
distances and colours in them. So the memory does not depend on the number of views, and the result
not on their order of arrival.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh.fusion.fused_cubes import FusedCubes, n_cubes
from sugar_extractors.mesh.fusion.fused_distances import BLOCK
from sugar_extractors.mesh.fusion.marching_cubes import EMPTY_MESH, SparseField, extract_surface
from sugar_extractors.mesh.fusion.observed_region import ObservedRegion
from sugar_extractors.mesh.fusion.thin_parts import ThinParts, lost_places
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView, Renderer
from sugar_scene.regions import WHOLE, Box, Region
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.flags import non_negative_float, positive_float
from sugar_utils.settings import flag

DEPTHS = ("blended", "plane")  # where depth comes from
PLANE_MARGIN = 0.05  # of a multi-view model, in camera extents
PLANE_DIAGONAL = 6.0  # voxels; smaller components of its meshes from it on are pieces of thin parts
PLANE_FILL = 32  # edges of pinholes in its meshes: at grazing angles some depths are not confirmed
_N_FOOTPRINT_VIEWS = 8  # views from which the size of a pixel on the surface is measured
_COARSER = 1.25  # least factor by which voxels grow where there are too many
_MOST_VOXELS_PER_SIDE = 2048  # of the box, with automatic voxels
_flag = partial(flag, group="surface", no_effect_when="with --mesh_extractor poisson")


@dataclass(frozen=True)
class TsdfConfig:
    """Constants of the fusion.

    Blended depth is the mean along the ray, divided by alpha. The automatic voxel is the median
    side of a pixel on the surface times ``pixels_per_voxel``, at least 1/2048 of the box.
    """

    tsdf_depth: str = _flag(
        "blended",
        "blended: depth as rendered, all Gaussians averaged; plane: of the planes that "
        "Gaussians are, checked against neighbouring views; unset: plane of a multiview model, "
        "else blended",
        choices=DEPTHS,
        modes={"multiview": "plane"},
    )
    tsdf_voxel_size: float | None = _flag(
        None, "world units; unset: from the size of a pixel on the surface", parse=positive_float
    )
    pixels_per_voxel: float = 1.5
    tsdf_margin: float | None = _flag(
        None,
        "camera extents by which the surface may lie outside of the convex hull of the "
        f"reconstruction's points; unset: {PLANE_MARGIN} with --tsdf_depth plane, else anywhere",
        parse=non_negative_float,
        no_effect_when="where the scene has no tracks of points",
    )
    truncation: float = 4.0  # reach of the fused distances, in voxels
    min_alpha: float = 0.5
    min_component: int = 300  # components of fewer triangles go, unless they are long
    # Ceiling of the voxels stored; where it is met, voxels are made larger.
    max_voxels: int = 40_000_000

    @property
    def margin(self) -> float | None:
        """The margin around the reconstruction's points in camera extents; None for none."""
        if self.tsdf_margin is not None:
            return self.tsdf_margin
        return PLANE_MARGIN if self.tsdf_depth == "plane" else None

    @property
    def min_diagonal(self) -> float:
        """Diagonal of the box, in voxels, from which a component stays however few triangles."""
        return PLANE_DIAGONAL if self.tsdf_depth == "plane" else math.inf

    @property
    def adds_thin_parts(self) -> bool:
        """Whether parts too thin for the voxels are fused again; blended depth is too noisy."""
        return self.tsdf_depth == "plane"

    @property
    def fill(self) -> int:
        """Edges of the largest holes that are closed before decimation; 0 for none."""
        return PLANE_FILL if self.tsdf_depth == "plane" else 0


@dataclass(frozen=True)
class FusedRegion:
    """The surface within a box."""

    mesh: TriangleMesh
    voxel_size: float  # side of a voxel, world units
    n_voxels: int  # that were stored; with tetrahedra the number of their corners


@dataclass(frozen=True)
class Fusion:
    """The fusion of all views within a box."""

    render: Renderer
    cameras: Sequence[Camera]
    box: Box
    config: TsdfConfig
    console: Console

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the depth."""
        return self.render(self.cameras[0]).depth.device

    def surface(
        self, region: ObservedRegion | None = None, *, thin_parts: bool = False
    ) -> FusedRegion:
        """Fuse all views within the box and extract the surface within a region.

        Args:
            thin_parts: Whether parts too thin for the voxels are fused again.
        """
        config = self.config
        with torch.no_grad():
            voxel = config.tsdf_voxel_size or self.automatic_voxel()
            if voxel is None:
                return FusedRegion(EMPTY_MESH, voxel_size=0.0, n_voxels=0)
            field = self._fused_field(voxel)
        mesh = extract_surface(field)
        if region is not None and mesh.n_faces:
            mesh = triangle_mesh.keep_vertices(mesh, region.contains(mesh.vertices))
        voxel = field.voxel
        n_voxels = field.distances.numel()
        mesh = cleaned(mesh, config, config.min_diagonal * voxel)
        if thin_parts:
            with torch.no_grad():
                lost = lost_places(mesh, field, self._views())
            # The memory of large voxels is for smaller ones now.
            del field
            is_searched = self.box.contains(lost)
            if region is not None:
                is_searched &= region.without_margin().contains(lost)
            mesh = self._with_thin_parts(mesh, voxel, lost[is_searched])
        return FusedRegion(mesh, voxel, n_voxels)

    def _with_thin_parts(self, mesh: TriangleMesh, voxel: float, lost: np.ndarray) -> TriangleMesh:
        """Return a surface with the parts that are too thin for its voxels."""
        config = self.config
        parts = ThinParts(
            box=self.box,
            voxel=voxel,
            truncation=config.truncation,
            views=self._views(),
            device=self.device,
            console=self.console,
        )
        return triangle_mesh.without_small_components(
            parts.added_to(mesh, lost), config.min_component, config.min_diagonal * voxel
        )

    def automatic_voxel(self) -> float | None:
        """Return the side of a voxel in world units; None where no depth is in the box."""
        box = self.box
        parts = []
        for camera in about(self.cameras, _N_FOOTPRINT_VIEWS):
            view = self.render(camera)
            points = view.world_points(view.depth)
            depths = view.depth.flatten()
            low = points.new_tensor(box.low)
            high = points.new_tensor(box.high)
            is_inside = ((points > low) & (points < high)).all(dim=-1)
            is_inside &= depths > 0
            parts.append(depths[is_inside] / math.sqrt(camera.fx * camera.fy))
        pixel_sizes = torch.cat(parts)
        if len(pixel_sizes) == 0:
            return None
        median = float(pixel_sizes.sort().values[len(pixel_sizes) // 2])
        smallest = box.longest_side / _MOST_VOXELS_PER_SIDE
        return max(self.config.pixels_per_voxel * median, smallest)

    def _fused_field(self, voxel: float) -> SparseField:
        """Return the means of all views within the truncation distance of some depth.

        Voxels are made larger if there are too many.
        """
        max_voxels = self.config.max_voxels
        while True:
            reached = self._reached_blocks(voxel)
            n = int(reached.sum()) * BLOCK**3
            if n <= max_voxels:
                break
            larger = voxel * max(_COARSER, math.sqrt(n / max_voxels))
            self.console.info(f"voxels of {voxel:.4g} would be too many; taking {larger:.4g}")
            voxel = larger
        return self._cubes(voxel).averaged(self._views(), reached, self.console)

    def _views(self) -> list[Callable[[], DepthView]]:
        return [partial(self.render, camera) for camera in self.cameras]

    def _cubes(self, voxel: float) -> FusedCubes:
        return FusedCubes(self.box.low, voxel, self.config.truncation * voxel)

    def _reached_blocks(self, voxel: float) -> Tensor:
        """Return which blocks of the box the depth of some view reaches. (X, Y, Z) bool"""
        cubes = self._cubes(voxel)
        shape = n_cubes(self.box.low, self.box.high, voxel)
        reached = torch.zeros(shape, dtype=torch.bool, device=self.device)
        with self.console.progress("blocks", 1, len(self.cameras)) as progress:
            for done, camera in enumerate(self.cameras, start=1):
                cubes.mark(self.render(camera), reached)
                progress.update(done)
        return reached


def cleaned(
    mesh: TriangleMesh, config: TsdfConfig, min_diagonal: float, region: Region = WHOLE
) -> TriangleMesh:
    """Remove small components and close pinholes, but nothing that goes on in another region.

    Args:
        min_diagonal: Of the box of a component that stays however few triangles it has, world
            units.
    """
    continues = region.shared(mesh.vertices)
    mesh = triangle_mesh.without_small_components(
        mesh, config.min_component, min_diagonal, continues
    )
    if not config.fill:
        return mesh
    return triangle_mesh.with_holes_filled(mesh, config.fill, region.shared(mesh.vertices))
