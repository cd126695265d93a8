# SPDX-License-Identifier: Apache-2.0
"""The refinement stage: mesh and bound Gaussians optimised together (section 4.3), and its run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.engine.runner import Messages
from gaussian_splatting.engine.stage import (
    COLOR,
    LossTerm,
    Stage,
    StepResult,
    acting,
    backpropagate,
    report,
)
from gaussian_splatting.engine.strips import ViewPass
from gaussian_splatting.engine.training_views import is_counted, without_uncovered
from gaussian_splatting.optim.learned_exposure import Exposures, unexposed
from gaussian_splatting.optim.schedule import scaled
from gaussian_splatting.rasterization import WARP, Rasterizer, project
from gaussian_splatting.rasterization.render import masked_shares
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0, sh_basis_of
from gaussian_splatting.shared_flags import (
    Preset,
    checkpoint_interval,
    preset,
    scaled_checkpoint_interval,
)
from sugar_scene import mesh_bound
from sugar_scene.mesh_bound import PREFIX, BoundCloud, TrainableBoundCloud
from sugar_scene.mesh_normals import PairsOfTriangles, adjacent_face_pairs
from sugar_scene.reprojection import NeighborViews, triangle_planes
from sugar_scene.triangle_mesh import edge_keys, read_mesh_ply
from sugar_scene.triangle_rasterizer import TriangleHits, pixels_of_points, rasterize_triangles
from sugar_trainers.naming import OUTPUT_ROOT, refined_name, scene_name
from sugar_trainers.stage_config import MultiviewConfig, RefineConfig
from sugar_trainers.stage_options import TrainingOptions
from sugar_trainers.view_comparison import Comparison, ViewComparer, view_errors
from sugar_utils.console import Console
from sugar_utils.device import upload
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.settings import flag

# initial sizes, on the mesh and of the background
LARGEST_AT_BORDERS = 2.0
LARGEST_BESIDE = 1.5
OPACITY_BEFORE_BACKGROUND = 0.9  # initial one; what is behind the mesh would show through 0.1

N_COEFFICIENTS = 4  # of bands 0 and 1; two bands measured no better
RIDGE = 1.0  # views in which band 1 is zero, beside those that show a Gaussian
Photograph = tuple[Camera, Tensor, Tensor | None]
"""A camera; its image, (H, W, 3) or (H, W, 4) uint8; its exposure, (2, 3), if it has one."""
MIN_SHARE = 0.2  # of the blending weights beside the mesh
_MAX_SIDE = 480
TEST_INTERVAL = 7_500
_alone = partial(flag, group="only train_refined.py")


class RefineStage(Stage):
    """Colour loss and normal consistency on mesh-bound Gaussians."""

    name = "refine"

    def __init__(
        self,
        cloud: BoundCloud,
        config: RefineConfig,
        extent: float,
        export: Callable[[BoundCloud], None] | None = None,
        rasterizer: Rasterizer = WARP,
        exposures: Exposures | None = None,
        comparer: ViewComparer | None = None,
    ) -> None:
        self.extent = extent
        self.exposures = exposures
        vertex_scale = config.vertex_rate_scale(extent)
        self.model = TrainableBoundCloud(
            cloud, config.rates, vertex_scale, config.optimizer, config.random_seed, extent
        )
        self.memory_plan = MemoryPlan(config.split)
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        self._comparer = comparer
        # The topology never changes, so what follows from it is found once.
        self._placement = mesh_bound.Placement(cloud)
        self._pairs = PairsOfTriangles(adjacent_face_pairs(cloud.faces), len(cloud.vertices))
        self.terms = refine_terms(config, self._pairs)
        self._largest = {}
        if cloud.background is not None:
            beside = cloud.background.log_scales.detach() + math.log(LARGEST_BESIDE)
            self._largest = {"log_scales": largest_at_borders(cloud), PREFIX + "log_scales": beside}
        self._iteration = 0

    def phase(self, iteration: int) -> str:
        return "refine"

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self.model.schedule_vertex_rate(iteration / self._config.schedule_scale)
        # What is beside the mesh is for the background to show; and where a distant Gaussian grows,
        # its linear projection covers views that it lies beside.
        for name, largest in self._largest.items():
            self.model.optimizer.parameters[name].detach().clamp_(max=largest)

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        on = acting(self.terms, iteration)
        mesh = MeshView(self.model.cloud, camera)
        if self._comparer is not None:
            faces = mesh.hits(camera).face
            covered = without_uncovered(target, faces >= 0)
            outside = camera.mask is not None and camera.mask.mode == "object"
            if self.model.cloud.background is None and not outside:
                # Outside of an object there is nothing, and that is known everywhere.
                target = covered
            compared = self._comparer.comparison(camera, covered, mesh.depth, iteration, view_index)
            mesh = replace(mesh, faces=faces, comparison=compared)
        seen = self.target(target, camera, iteration, view_index)
        projected = project(self.gaussians(), camera, sh_degree=self._config.sh_degree(iteration))
        view = ViewPass(
            projected,
            seen.background,
            self.memory_plan.split,
            rasterizer=self._rasterizer,
            pairs=self.pairs,
        )
        found, _ = view.backpropagate([term.bind(camera, seen) for term in on["image"]])
        found.update(backpropagate(on["model"], mesh))
        commit = partial(self.collect_exposure, camera.name, seen.exposure)
        return StepResult(report(self.terms, found), view.radii, view.guess, commit)

    def gaussians(self) -> Gaussians:
        return self.model.cloud.activate_all(self._placement)

    def rendered_degree(self) -> int:
        return self._config.sh_degree(max(1, self._iteration))

    def export(self, iteration: int) -> None:
        if self._export is not None:
            self._export(self.model.cloud)


def largest_at_borders(cloud: BoundCloud) -> Tensor:
    """Log of largest sizes: at open edges twice the present one, elsewhere infinite. (G, 1)"""
    keys = torch.from_numpy(edge_keys(cloud.faces.cpu().numpy()))
    _, edge, count = keys.unique(return_inverse=True, return_counts=True)
    inner = (count[edge] > 1).all(dim=1).repeat_interleave(cloud.per_triangle)
    inner = inner.to(cloud.log_scales.device)[:, None]
    largest = cloud.log_scales.detach().amax(dim=1, keepdim=True) + math.log(LARGEST_AT_BORDERS)
    return torch.where(inner, torch.inf, largest)


@dataclass(frozen=True)
class MeshView:
    """What a term sees of the mesh in a view."""

    cloud: BoundCloud
    camera: Camera
    faces: Tensor | None = None  # first face that each pixel meets, -1 for none. (H, W) int32
    comparison: Comparison | None = None  # None where the view has no neighbour

    def hits(self, camera: Camera) -> TriangleHits:
        return rasterize_triangles(self.cloud.vertices.detach(), self.cloud.faces, camera)

    def depth(self, camera: Camera) -> Tensor:
        """Depth of the mesh in a view, 0 where there is none. (H, W) world units"""
        hits = self.hits(camera)
        return torch.where(hits.covered, hits.depth, 0.0)

    def view_errors(self, factors: tuple[float, float]) -> Tensor | None:
        """Mean error of the compared pixels, whose planes are those of their triangles."""
        if self.comparison is None or not len(self.comparison.pixels):
            return None
        pixels = self.comparison.pixels
        faces = self.faces[pixels[:, 1].long(), pixels[:, 0].long()]
        planes = triangle_planes(self.cloud.vertices, self.cloud.faces, self.camera, faces)
        return view_errors(self.comparison, planes, pixels, *factors).mean()


def refine_terms(config: RefineConfig, pairs: PairsOfTriangles) -> tuple[LossTerm, ...]:
    """Every term of the stage; ``"model"`` terms are given a :class:`MeshView`."""
    weight = config.normal_consistency_factor

    def normal_consistency(seen: MeshView) -> Tensor:
        return pairs.normal_consistency(seen.cloud.vertices)

    terms = [COLOR]
    if config.refine_surface_terms:
        views = partial(MeshView.view_errors, factors=MultiviewConfig().view_factors)
        terms.append(LossTerm("views", 1.0, "model", views))
    if weight > 0:
        terms.append(LossTerm("normal_consistency", weight, "model", normal_consistency))
    return tuple(terms)


# Colours of vertices are as coarse as the mesh and the same from all sides, and an optimiser needs
# hundreds of steps to change that: colours of mesh-bound Gaussians come from the photographs. What
# the mesh does not show, as sky, distance and parts thinner than triangles, stays beside it.


@torch.no_grad()
def with_photograph_colors(cloud: BoundCloud, photographs: Iterable[Photograph]) -> BoundCloud:
    """Gaussians with the colours of the views that show their centres; others as they are.

    Spherical harmonics of degree 1, by least squares with a ridge.
    """
    points = cloud.activate().means
    normal = points.new_zeros(len(points), N_COEFFICIENTS, N_COEFFICIENTS)
    right = points.new_zeros(len(points), N_COEFFICIENTS, 3)
    for camera, image, exposure in photographs:
        shown, row, column = pixels_of_points(points, cloud.vertices, cloud.faces, camera)
        image = upload(image, points.device)
        counted = is_counted(image)
        if counted is not None:
            shown &= counted[row, column]
        colors = image[row, column, :3] / 255.0
        if exposure is not None:
            colors = unexposed(colors, exposure.to(colors.device))
        directions = normalize(points - points.new_tensor(camera.center), dim=1)
        basis = sh_basis_of(directions)[:, :N_COEFFICIENTS] * shown[:, None]
        normal += basis[:, :, None] * basis[:, None]
        right += basis[:, :, None] * (colors - 0.5)[:, None]
    seen = normal[:, :1, :1] > 0
    ridge = normal.new_full((N_COEFFICIENTS,), RIDGE * SH_C0**2)
    ridge[0] = 0.0
    one = torch.eye(N_COEFFICIENTS, device=normal.device)
    solvable = torch.where(seen, normal + ridge.diag(), one)
    band_0, band_1 = torch.linalg.solve(solvable, right).split([1, N_COEFFICIENTS - 1], dim=1)
    rest = torch.cat([band_1, cloud.sh_rest[:, N_COEFFICIENTS - 1 :]], dim=1)
    sh_dc = torch.where(seen, band_0, cloud.sh_dc)
    return replace(cloud, sh_dc=sh_dc, sh_rest=torch.where(seen, rest, cloud.sh_rest))


def background_rows(
    gaussians: Gaussians,
    vertices: Tensor,
    faces: Tensor,
    cameras: Sequence[Camera],
    rasterizer: Rasterizer = WARP,
) -> Tensor:
    """Gaussians that blend into pixels which the mesh does not cover. (N,) bool

    With a fifth of their weights there, so that no gap is left around the mesh.
    """
    views = [camera.reduced(_MAX_SIDE) for camera in cameras]
    hits = (rasterize_triangles(vertices, faces, view) for view in views)
    beside = ((view, (~hit.covered).float()) for view, hit in zip(views, hits, strict=True))
    return masked_shares(gaussians, beside, rasterizer) > MIN_SHARE


@dataclass(frozen=True, kw_only=True)
class RefineOptions(TrainingOptions):
    title: ClassVar[str] = "refinement"

    mesh_path: Path = _alone(
        MISSING,
        "coarse mesh (PLY with vertex colours); needed",
        short="-m",
        parse=Path,
        missing="pass the coarse mesh that extract_mesh.py made",
    )
    output_dir: Path | None = _alone(
        None, "parent of the run's folder; unset: output/refined/<scene>", short="-o", parse=Path
    )
    coarse_model_path: Path | None = _alone(
        None,
        "coarse model (.pt) whose background is kept; unset: that of the checkpoint",
        parse=Path,
        no_effect_when="without --keep_background True",
    )
    ply_dir: Path | None = None  # None for output_dir, or without that output/refined_ply/<scene>
    config: RefineConfig = field(default_factory=RefineConfig)
    checkpoint_interval: int = checkpoint_interval("only train_refined.py")
    preset: Preset = preset("only train_refined.py")
    export_ply: bool = flag(True, "write the refined Gaussians as PLY", group="refinement stage")

    @property
    def reads_tracks(self) -> bool:
        """Neighbouring views are found by the points that photographs observe."""
        return self.config.refine_surface_terms

    @property
    def name(self) -> str:
        weight = self.config.normal_consistency_factor
        return refined_name(self.mesh_path, weight, self.config.gaussians_per_triangle)

    @property
    def directory(self) -> Path:
        parent = self.output_dir or OUTPUT_ROOT / "refined" / scene_name(self.scene_path)
        return parent / self.name

    @property
    def result(self) -> Path:
        return self.directory / f"{self.config.refinement_iterations}.pt"

    @property
    def ply_path(self) -> Path:
        usual = OUTPUT_ROOT / "refined_ply" / scene_name(self.scene_path)
        return (self.ply_dir or self.output_dir or usual) / f"{self.name}.ply"

    @property
    def results(self) -> tuple[Path, ...]:
        return (self.result, *([self.ply_path] if self.export_ply else []))

    @property
    def loop(self) -> LoopConfig:
        config = self.config
        last = self.config.refinement_iterations
        test_interval = scaled(TEST_INTERVAL, config.schedule_scale)
        return LoopConfig(
            first=1,
            last=last,
            seed=config.random_seed,
            log_interval=config.log_interval,
            checkpoint_interval=scaled_checkpoint_interval(
                self.checkpoint_interval, config.schedule_scale, last
            ),
            keep_checkpoints=self.run.keep_checkpoints,
            test_iterations=tuple(range(test_interval, last, test_interval)),
        )

    def sources(self) -> dict[str, Any]:
        return {**super().sources(), "mesh": self.mesh_path.resolve()}

    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[BoundCloud, dict[str, Any]]:
        if not self.mesh_path.is_file():
            raise UserError(f"--mesh_path {self.mesh_path}: no such file; pass the coarse mesh PLY")
        mesh = read_mesh_ply(self.mesh_path)
        device = self.compute.device
        messages.detail(
            f"{mesh.n_vertices:,} vertices and {mesh.n_faces:,} triangles of {self.mesh_path}"
        )
        vertices = torch.tensor(mesh.vertices, dtype=torch.float32, device=device)
        faces, colors = (torch.tensor(array, device=device) for array in (mesh.faces, mesh.colors))
        config = self.config
        opacity = mesh_bound.INITIAL_OPACITY
        if config.keep_background:
            opacity = OPACITY_BEFORE_BACKGROUND
        per_triangle = config.gaussians_per_triangle
        cloud = mesh_bound.bind_to_mesh(
            vertices, faces, colors.float() / 255.0, per_triangle, scene.extent, opacity
        )
        cloud = replace(cloud, antialiased=config.antialiased)
        digests = {"mesh": file_digest(self.mesh_path)}
        if not config.keep_background:
            return cloud, digests
        path = self.coarse_model_path
        if path is None:
            path = checkpoint.ply_path
            free = checkpoint.read_cloud(messages)
        else:
            free = cloud_from_state(load_payload(path)["state_dict"], "coarse SuGaR model")
        free = free.to(device)
        surface = (cloud.vertices, cloud.faces)
        cameras = scene.train_cameras
        rows = background_rows(free.activate(), *surface, cameras, self.compute.rasterizer)
        messages.detail(f"background: {int(rows.sum()):,} of {len(free):,} Gaussians of {path}")
        if rows.any():
            cloud = replace(cloud, background=free.select(rows))
        return cloud, {**digests, "background": file_digest(path)}

    def stage(
        self,
        model: BoundCloud,
        config: RefineConfig,
        scene: Scene,
        store: ImageStore,
        console: Console,
        exposures: Exposures | None,
    ) -> RefineStage:
        rasterizer = self.compute.rasterizer
        comparer = None
        cameras = scene.train_cameras
        if config.initial_colors == "photographs":
            known = {} if exposures is None else exposures.by_name()
            photographs = ((c, store.get(c), known.get(c.name)) for c in cameras)
            model = with_photograph_colors(model, photographs)

        def export(refined: BoundCloud) -> None:
            write_gaussian_ply(self.ply_path, refined.freed())
            console.info(f"refined Gaussians: {self.ply_path}")

        if config.refine_surface_terms:
            neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
            pixels = MultiviewConfig().multiview_pixels
            seed = config.random_seed
            comparer = ViewComparer(neighbors, store, scene.extent, pixels, seed, rasterizer)
        exports = export if self.export_ply else None
        return RefineStage(model, config, scene.extent, exports, rasterizer, exposures, comparer)
