# SPDX-License-Identifier: Apache-2.0
"""Synthetic scenes for measuring a training step: a cloud, a wall to refine, two views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.exposures import Exposures
from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.multiview_stage import MultiviewStage, comparison_rule
from sugar_trainers.stage_config import MultiviewConfig
from sugar_trainers.view_comparison import ViewComparer

BASELINE = 0.05
"""Distance of the two views in camera extents."""
REPLICATED = 500_000
"""Largest scene that is drawn; larger ones consist of jittered copies, which takes no minutes."""


@dataclass(frozen=True)
class Case:
    """A scene to time.

    Attributes:
        name: As ``--case`` takes it.
        n: Gaussians.
        width: Image width in pixels.
        height: Image height in pixels.
        repeats: Timed repetitions.
        radius: Median radius on screen, in pixels: three deviations along the longest axis.
    """

    name: str
    n: int
    width: int
    height: int
    repeats: int
    radius: float = 4.4

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{self.n:,} Gaussians, {self.width} x {self.height}"


def make_scene(case: Case, seed: int = 0) -> tuple[Gaussians, Camera]:
    """Gaussians like those of a trained model: a wavy wall, a sphere before it, and floaters.

    Sizes on screen are log-normal, shapes flat or needle-like, opacities either high or spread
    towards low.

    Args:
        case: Number, image size and median radius.
        seed: Random seed.
    """
    rng = np.random.default_rng(seed)
    focal, n = 0.86 * case.width, case.n
    camera = Camera(
        "benchmark",
        case.width,
        case.height,
        focal,
        focal,
        case.width / 2,
        case.height / 2,
        rotation=np.eye(3),
        translation=np.zeros(3),
    )
    n_wall, n_ball = round(0.7 * n), round(0.2 * n)
    n_free = n - n_wall - n_ball
    half = np.array([case.width, case.height]) / (2 * focal)

    def in_view(depth: np.ndarray, at: np.ndarray) -> np.ndarray:
        return np.concatenate([at * depth[:, None] * half, depth[:, None]], axis=1)

    at = rng.uniform(-1.05, 1.05, (n_wall, 2))
    wall = in_view(6 + 0.5 * np.sin(3 * at[:, 0]) + rng.normal(0, 0.03, n_wall), at)
    ball = rng.normal(size=(n_ball, 3))
    ball /= np.linalg.norm(ball, axis=1, keepdims=True)
    ball += (0.3, 0.0, 4.0) + rng.normal(0, 0.01, (n_ball, 3))
    free = in_view(rng.uniform(2, 12, n_free), rng.uniform(-1.05, 1.05, (n_free, 2)))
    means = np.concatenate([wall, ball, free])

    deviation = np.exp(rng.normal(np.log(case.radius / 3), 0.75, n)) * means[:, 2] / focal
    flatness = np.exp(-np.abs(rng.normal(0, (1e-4, 0.6, 1.2), (n, 3))))
    quats = rng.normal(size=(n, 4))
    solid = rng.uniform(size=n) < 0.35
    opacities = np.where(solid, rng.beta(6, 1.2, n), rng.beta(1, 2, n))
    arrays = (
        means,
        quats / np.linalg.norm(quats, axis=1, keepdims=True),
        deviation[:, None] * flatness,
        opacities,
        rng.normal(0, 0.8, (n, 1, 3)),
        rng.normal(0, 0.2, (n, 15, 3)),
    )
    return Gaussians(*(torch.from_numpy(a.astype(np.float32)) for a in arrays)), camera


def as_cloud(gaussians: Gaussians) -> GaussianCloud:
    """Raw parameters of activated Gaussians, their opacities between 0.01 and 0.99."""
    return GaussianCloud(
        means=gaussians.means,
        sh_dc=gaussians.sh_dc,
        sh_rest=gaussians.sh_rest,
        opacity_logits=torch.logit(gaussians.opacities.clamp(0.01, 0.99))[:, None],
        log_scales=gaussians.scales.log(),
        quats=gaussians.quats,
    )


def photograph(camera: Camera) -> Tensor:
    """Bytes without meaning. (H, W, 3)"""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(256, (camera.height, camera.width, 3), generator=rng, dtype=torch.uint8)


def make_wall(n_faces: int) -> tuple[Tensor, Tensor, Tensor]:
    """A wavy wall of about ``n_faces`` triangles that fills the view, grey."""
    side = max(2, round((n_faces / 2) ** 0.5))
    x, y = np.meshgrid(np.linspace(-3.6, 3.6, side + 1), np.linspace(-2.4, 2.4, side + 1))
    points = np.stack([x, y, 6 + 0.3 * np.sin(2 * x)], axis=-1).reshape(-1, 3)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).reshape(-1, 1)
    faces = np.concatenate([corner + (0, 1, side + 1), corner + (1, side + 2, side + 1)])
    return (
        torch.from_numpy(points.astype(np.float32)),
        torch.from_numpy(faces),
        torch.full((len(points), 3), 0.5),
    )


@dataclass(frozen=True)
class MadeUpPhotographs:
    """Stands in for the store of decoded photographs."""

    get: Callable[[Camera], Tensor]
    prefetch: Callable[[Camera], None] = lambda camera: None
    serve: Callable[[torch.device], None] = lambda device: None


def make_multiview_stage(
    cloud: GaussianCloud,
    camera: Camera,
    config: MultiviewConfig,
    extent: float,
    photograph: Callable[[Camera], Tensor],
    exposures: Exposures | None = None,
) -> MultiviewStage:
    """The stage.

    Args:
        cloud: Its Gaussians.
        camera: The view that is trained on.
        config: Settings.
        extent: Camera extent in world units.
        photograph: Makes the photograph of a camera. (H, W, 3) uint8
        exposures: Those of the photographs.
    """
    moved = camera.translation + np.array([BASELINE * extent, 0.0, 0.0])
    cameras = [camera, replace(camera, name="beside", translation=moved)]
    comparer = ViewComparer(
        NeighborViews(cameras, extent),
        MadeUpPhotographs(photograph),
        extent,
        comparison_rule(config),
        device=cloud.means.device,
    )
    components = [] if exposures is None else [exposures]
    return MultiviewStage(
        cloud, config, Region(extent), cameras, comparer, lambda message: None, components
    )


def large_scene(
    n: int, width: int, height: int, device: torch.device | str
) -> tuple[Gaussians, Camera]:
    """A scene of ``make_scene`` with any number of Gaussians, equally dense on screen."""
    radius = 4.4 * width / 1920 * (1e6 / n) ** 0.5
    base, camera = make_scene(Case("large", min(n, REPLICATED), width, height, 1, radius=radius))
    copies = -(-n // len(base))
    tensors = [
        t.to(device).repeat(copies, *[1] * (t.dim() - 1))[:n].contiguous() for t in base.tensors()
    ]
    scene = Gaussians(*tensors)
    rng = torch.Generator(device=device).manual_seed(0)
    moved = torch.randn(scene.means.shape, generator=rng, device=device)
    scene.means[len(base) :] += 4 * (scene.scales.amax(dim=1, keepdim=True) * moved)[len(base) :]
    return scene, camera


def large_cloud(
    n: int, width: int, height: int, device: torch.device | str
) -> tuple[GaussianCloud, Camera]:
    """The same as raw parameters."""
    scene, camera = large_scene(n, width, height, device)
    return as_cloud(scene), camera
