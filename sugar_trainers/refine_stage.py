# SPDX-License-Identifier: Apache-2.0
"""The refinement stage: mesh and bound Gaussians optimised together (section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gaussian_splatting.components.depth_supervision import depth_errors, inverse_depths
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, ViewResult
from gaussian_splatting.engine.loss_terms import COLOR, LossTerm, acting, backpropagate, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.training_views import (
    AddedLoss,
    ImageStrip,
    TrainingView,
    without_uncovered,
)
from gaussian_splatting.rasterization import WARP, Rasterizer, project
from sugar_scene import mesh_bound
from sugar_scene.bound_model import TrainableBoundCloud
from sugar_scene.mesh_bound import PREFIX, BoundCloud
from sugar_scene.mesh_normals import PairsOfTriangles, adjacent_face_pairs
from sugar_scene.reprojection import NeighborViews, triangle_planes
from sugar_scene.triangle_mesh import edge_keys
from sugar_scene.triangle_rasterizer import TriangleHits, rasterize_triangles
from sugar_trainers.initial_colors import with_photograph_colors
from sugar_trainers.stage_config import MultiviewConfig, RefineConfig
from sugar_trainers.stage_options import StageContext
from sugar_trainers.view_comparison import (
    Comparison,
    ComparisonRule,
    ViewComparer,
    view_errors,
)

# Factors of initial sizes: of Gaussians at open edges of the mesh, and of those beside it.
LARGEST_AT_BORDERS = 2.0
LARGEST_BESIDE = 1.5
DEPTH = "mesh_depth"
DEPTH_WEIGHT = 0.02  # more lies closer to the mesh, and costs detail


class RefineStage(Stage[TrainableBoundCloud, RefineConfig]):
    """Colour loss and normal consistency on mesh-bound Gaussians.

    Args:
        extent: Of the cameras, world units.
        export: Writes the final model; None writes nothing.
        components: What is learned beside the model.
        comparer: Chooses what views are compared with; None for no term of it.
    """

    name = "refine"

    def __init__(
        self,
        cloud: BoundCloud,
        config: RefineConfig,
        extent: float,
        export: Callable[[BoundCloud], None] | None = None,
        rasterizer: Rasterizer = WARP,
        components: Sequence[Component] = (),
        comparer: ViewComparer | None = None,
    ) -> None:
        self.extent = extent
        self.components = components
        self.model = TrainableBoundCloud(
            cloud,
            config.rates,
            config.vertex_rate_scale(extent),
            config.optimizer,
            config.random_seed,
            extent,
        )
        self.memory_plan = MemoryPlan(config.split, records=config.records)
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        self._comparer = comparer
        self.further_images = comparer
        # The topology never changes, so what follows from it is found once.
        self._placement = mesh_bound.Binding(cloud)
        self._pairs = PairsOfTriangles(adjacent_face_pairs(cloud.faces), len(cloud.vertices))
        self.terms = refine_terms(config, self._pairs)
        self._largest: dict[str, Tensor] = {}
        if cloud.background is not None:
            background_sizes = cloud.background.log_scales.detach()
            self._largest = {
                "log_scales": largest_at_borders(cloud),
                PREFIX + "log_scales": background_sizes + math.log(LARGEST_BESIDE),
            }
        self._iteration = 0

    def phase(self, iteration: int) -> str:
        """There is one phase."""
        return "refine"

    def begin(self, iteration: int) -> None:
        """Set the rate of vertices, and bound the sizes of Gaussians."""
        super().begin(iteration)
        self._iteration = iteration
        self.model.schedule_vertex_rate(iteration / self._config.schedule_scale)
        # What is beside the mesh is for the background to show; and where a distant Gaussian grows,
        # its linear projection covers views that it lies beside.
        for name, largest in self._largest.items():
            self.model.optimizer.leaves[name].detach().clamp_(max=largest)

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view, choose its neighbour, and composite it on its background."""
        view = super().prepare(view)
        if self._comparer is not None:
            view = self._compared(view, self._comparer)
        return self.composited(view)

    def sh_degree(self, iteration: int) -> int:
        """Degree of the spherical harmonics, which grows with the iterations."""
        return self._config.sh_degree(iteration)

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate terms of the image, then those of the mesh."""
        activated = self.model.trained_cloud.activate_all(self._placement)
        gaussians = self.collecting(activated, view, resources)
        if view.surface is not None:
            view = view.with_loss(AddedLoss(DEPTH, (), unmoved_depths))
        view, features = self.with_features(view, gaussians)
        degree = self.sh_degree(view.iteration)
        # Without a name of its own: it is freed before the gradients of the model are made.
        view_pass = self.view_pass(
            project(gaussians, view.camera, sh_degree=degree, features=features, graph=False),
            view,
            resources,
        )
        del activated, gaussians
        terms = self.all_terms(view)
        active = acting(terms, view.iteration)
        values, _ = view_pass.backpropagate(active["image"])
        mesh = MeshView(self.model.trained_cloud, view.camera, view.surface)
        values.update(backpropagate(active["model"], mesh))
        figures = report(terms, values)
        return ViewResult(view, figures, view_pass.radii, predicted=view_pass.predictions)

    def gaussians(self) -> Gaussians:
        """Gaussians on the mesh, and those of the background."""
        return self.model.cloud.activate_all(self._placement)

    def rendered_degree(self) -> int:
        """The degree that the last iteration trained."""
        return self.sh_degree(max(1, self._iteration))

    def export(self, iteration: int) -> None:
        """Write the model."""
        if self._export is not None:
            self._export(self.model.cloud)

    def _compared(self, view: TrainingView, comparer: ViewComparer) -> TrainingView:
        """Choose pixels of the mesh to compare with a neighbouring view."""
        mesh = MeshView(self.model.trained_cloud, view.camera)
        hits = mesh.hits(view.camera)
        faces = hits.face
        covered = replace(view, photograph=without_uncovered(view.target, faces >= 0))
        comparison = comparer.comparison(covered, mesh.depth)
        if self.model.trained_cloud.background is None and not view.camera.shows_object:
            # Outside of an object there is nothing, and that is known everywhere.
            view = covered
        depth = torch.where(hits.covered, hits.depth, 0.0)
        counted = view.counted_pixels
        if counted is not None:
            depth = depth * counted
        return replace(view, surface=ComparedMesh(faces, depth, comparison))


def largest_at_borders(cloud: BoundCloud) -> Tensor:
    """Log of largest sizes: at open edges twice the present one, elsewhere infinite. (G, 1)"""
    keys = torch.from_numpy(edge_keys(cloud.faces.cpu().numpy()))
    _, edge, count = keys.unique(return_inverse=True, return_counts=True)
    is_inner = (count[edge] > 1).all(dim=1).repeat_interleave(cloud.per_triangle)
    is_inner = is_inner.to(cloud.log_scales.device)[:, None]
    present = cloud.log_scales.detach().amax(dim=1, keepdim=True)
    return torch.where(is_inner, torch.inf, present + math.log(LARGEST_AT_BORDERS))


@dataclass(frozen=True)
class ComparedMesh:
    """The faces of the mesh in a view, and the neighbour that the view is compared with."""

    faces: Tensor  # first face that each pixel meets, -1 for none. (H, W) int32
    depth: Tensor  # of that face, 0 where it does not count. (H, W) world units
    comparison: Comparison | None  # None where the view has no neighbour


@dataclass(frozen=True)
class MeshView:
    """Inputs of the terms of the model: the mesh, and how a view shows it."""

    cloud: BoundCloud
    camera: Camera
    compared: ComparedMesh | None = None  # None where nothing is compared

    def hits(self, camera: Camera) -> TriangleHits:
        """Rasterize the mesh in a view."""
        return rasterize_triangles(self.cloud.vertices.detach(), self.cloud.faces, camera)

    def depth(self, camera: Camera) -> Tensor:
        """Depth of the mesh in a view, 0 where there is none. (H, W) world units"""
        hits = self.hits(camera)
        return torch.where(hits.covered, hits.depth, 0.0)

    def view_errors(self, factors: tuple[float, float]) -> Tensor | None:
        """Mean error of the compared pixels, with planes of their triangles."""
        comparison = None if self.compared is None else self.compared.comparison
        if self.compared is None or comparison is None or not len(comparison.pixels):
            return None
        pixels = comparison.pixels
        faces = self.compared.faces[pixels[:, 1].long(), pixels[:, 0].long()]
        planes = triangle_planes(self.cloud.vertices, self.cloud.faces, self.camera, faces)
        return view_errors(comparison, planes, pixels, *factors).mean()


def refine_terms(config: RefineConfig, pairs: PairsOfTriangles) -> tuple[LossTerm, ...]:
    """Every term of the stage; ``"model"`` terms are given a :class:`MeshView`."""
    weight = config.normal_consistency_factor

    def normal_consistency(mesh: MeshView) -> Tensor:
        return pairs.normal_consistency(mesh.cloud.vertices)

    terms = [COLOR]
    if config.refine_surface_terms:
        views = partial(MeshView.view_errors, factors=MultiviewConfig().view_factors)
        terms.append(LossTerm("views", 1.0, "model", views))
        terms.append(LossTerm(DEPTH, DEPTH_WEIGHT, "image", mesh_depth_errors))
    if weight > 0:
        terms.append(LossTerm("normal_consistency", weight, "model", normal_consistency))
    return tuple(terms)


def unmoved_depths(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Return what the depth term blends; vertices follow photographs alone. (N, 2)"""
    return inverse_depths(gaussians, camera).detach()


def mesh_depth_errors(strip: ImageStrip) -> Tensor:
    """Return the mean error of blended depth where the mesh is; see :func:`depth_errors`.

    It closes gaps between the Gaussians, through which what lies behind the mesh is seen.
    """
    depth = strip.view.surface.depth
    of_strip = strip.rows_of(depth)[strip.counted_rows]
    errors = (of_strip > 0) * depth_errors(strip.feature(DEPTH), of_strip)
    return errors.sum() / (depth > 0).sum().clamp_min(1)


def build_refine_stage(
    cloud: BoundCloud,
    config: RefineConfig,
    context: StageContext,
    export: Callable[[BoundCloud], None] | None,
) -> RefineStage:
    """Build the stage of a run; Gaussians may get their colours from the photographs first."""
    scene = context.scene
    cameras = scene.train_cameras
    if config.initial_colors == "photographs":
        exposures = {} if context.exposures is None else context.exposures.by_name()
        photographs = ((c, context.images.get(c), exposures.get(c.name)) for c in cameras)
        cloud = with_photograph_colors(cloud, photographs)
    comparer = None
    if config.refine_surface_terms:
        comparer = ViewComparer(
            NeighborViews(cameras, scene.extent, observations=scene.observations),
            context.images,
            scene.extent,
            ComparisonRule(MultiviewConfig().multiview_pixels, config.random_seed),
            context.rasterizer,
            device=cloud.opacity_logits.device,
        )
    return RefineStage(
        cloud, config, scene.extent, export, context.rasterizer, context.components, comparer
    )
