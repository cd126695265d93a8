# SPDX-License-Identifier: Apache-2.0
"""Rendering by other packages on the same Gaussians: values, and times in turns.

Each renders colours of degree 3 from activated Gaussians, forward and backward, as its own
documentation says. What is not installed is skipped; no package is fetched.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    Check,
    Finding,
    Setup,
    SkipCheck,
    draw,
    full_hd_scene,
    synchronize,
)
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import rasterize
from sugar_utils.memory import out_of_memory, release_cached

SIZES = (50_000, 300_000, 1_000_000, 3_000_000, 6_000_000)
ROUNDS = 9  # of which each package makes one pass in turn; the first one warms up
SECONDS = 12.0  # for the rounds of a size
SH_DEGREE = 3
NEAR = 0.01
FAR = 100.0
"""Depths of the packages' clip planes in world units, which serve the projection matrix alone."""

MAX_DIFFERENCE = 0.02
"""Relative L2 of images and gradients: packages cull and bound splats in different ways."""

Render = Callable[[Gaussians, Camera], Tensor]  # an image over black, (H, W, 3)


def _world_to_camera(camera: Camera, device: torch.device) -> Tensor:
    """Columns are camera axes. (4, 4)"""
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3] = torch.from_numpy(camera.rotation)
    matrix[:3, 3] = torch.from_numpy(camera.translation)
    return matrix.float().to(device)


def _coefficients(gaussians: Gaussians) -> Tensor:
    """All bands of the colours. (N, 16, 3)"""
    return torch.cat([gaussians.sh_dc, gaussians.sh_rest], dim=1)


def _ours(gaussians: Gaussians, camera: Camera) -> Tensor:
    return rasterize(gaussians, camera).image


def _by_gsplat(package: ModuleType) -> Render:
    def render(gaussians: Gaussians, camera: Camera) -> Tensor:
        device = gaussians.means.device
        intrinsics = torch.tensor(
            [[camera.fx, 0.0, camera.cx], [0.0, camera.fy, camera.cy], [0.0, 0.0, 1.0]],
            device=device,
        )
        images, _, _ = package.rasterization(
            gaussians.means,
            gaussians.quats,
            gaussians.scales,
            gaussians.opacities,
            _coefficients(gaussians),
            _world_to_camera(camera, device)[None],
            intrinsics[None],
            camera.width,
            camera.height,
            sh_degree=SH_DEGREE,
            packed=False,
        )
        return images[0]

    return render


def by_cuda_rasterizer(package: ModuleType) -> Render:
    """Packages with the interface of diff_gaussian_rasterization; centred principal points only."""

    def render(gaussians: Gaussians, camera: Camera) -> Tensor:
        device = gaussians.means.device
        tan_x, tan_y = camera.tan_half_fov
        to_camera = _world_to_camera(camera, device)
        projection = torch.zeros(4, 4, device=device)
        projection[0, 0] = 1 / tan_x
        projection[1, 1] = 1 / tan_y
        projection[2, 2] = FAR / (FAR - NEAR)
        projection[2, 3] = -FAR * NEAR / (FAR - NEAR)
        projection[3, 2] = 1.0
        settings = {
            "image_height": camera.height,
            "image_width": camera.width,
            "tanfovx": tan_x,
            "tanfovy": tan_y,
            "bg": torch.zeros(3, device=device),
            "scale_modifier": 1.0,
            "viewmatrix": to_camera.T.contiguous(),
            "projmatrix": (projection @ to_camera).T.contiguous(),
            "sh_degree": SH_DEGREE,
            "campos": torch.from_numpy(camera.center).float().to(device),
            "prefiltered": False,
            "debug": False,
        }
        # Versions have some of these settings, and others with defaults.
        fields = package.GaussianRasterizationSettings._fields
        known = {name: value for name, value in settings.items() if name in fields}
        draw_view = package.GaussianRasterizer(package.GaussianRasterizationSettings(**known))
        image, *_ = draw_view(
            means3D=gaussians.means,
            means2D=torch.zeros_like(gaussians.means, requires_grad=True),
            opacities=gaussians.opacities[:, None],
            shs=_coefficients(gaussians),
            scales=gaussians.scales,
            rotations=gaussians.quats,
        )
        return image.permute(1, 2, 0)

    return render


def _prepare_gswarp(package: ModuleType, device: torch.device) -> None:
    """Tune it as its documentation advises, once before training."""
    package.initialize_runtime_tuning(device=str(device), verbose=False)


@dataclass(frozen=True)
class Package:
    """Another package, and how it is called."""

    module: str
    adapt: Callable[[ModuleType], Render]
    prepare: Callable[[ModuleType, torch.device], None] = lambda package, device: None


PACKAGES = (
    Package("gswarp", by_cuda_rasterizer, _prepare_gswarp),
    Package("gsplat", _by_gsplat),
    Package("diff_gaussian_rasterization", by_cuda_rasterizer),
)


@dataclass
class _Pass:
    """Result of one pass, and its milliseconds."""

    image: Tensor
    gradients: list[Tensor]  # of all Gaussians, in the order of ``Gaussians.tensors``
    forward: float
    backward: float


def _pass(render: Render, gaussians: Gaussians, camera: Camera, weights: Tensor) -> _Pass:
    device = gaussians.means.device
    leaves = gaussians.as_leaves()
    synchronize(device)
    begun = time.perf_counter()
    image = render(leaves, camera)
    synchronize(device)
    rendered = time.perf_counter()
    image.backward(weights)
    synchronize(device)
    ended = time.perf_counter()
    gradients = []
    for leaf in leaves.tensors():
        gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return _Pass(image.detach(), gradients, 1e3 * (rendered - begun), 1e3 * (ended - rendered))


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def _differences(other: _Pass, ours: _Pass) -> dict[str, float]:
    """Of the image, and of the gradients of centres and of the first band of colours."""
    return {
        "image": _difference(other.image, ours.image),
        "d_means": _difference(other.gradients[0], ours.gradients[0]),
        "d_sh_dc": _difference(other.gradients[4], ours.gradients[4]),
    }


def _installed(package: Package, setup: Setup) -> Render:
    """The package's way to render; a check is skipped where there is none."""
    setup.need_cuda()
    try:
        module = importlib.import_module(package.module)
    except ImportError as error:
        raise SkipCheck(f"{package.module} is not installed ({error})") from error
    package.prepare(module, setup.place)
    return package.adapt(module)


def alone(setup: Setup) -> Iterator[Finding]:
    """Time our own passes in the same way, at the smallest size, whatever is installed."""
    gaussians, camera = full_hd_scene(setup, setup.size(SIZES[0], 300))
    weights = draw(camera.height, camera.width, 3).to(setup.place)
    passes = [_pass(_ours, gaussians, camera, weights) for _ in range(setup.size(ROUNDS, 2))]
    forward = statistics.median(one.forward for one in passes[1:])
    backward = statistics.median(one.backward for one in passes[1:])
    is_finite = all(bool(gradient.isfinite().all()) for gradient in passes[-1].gradients)
    figures = {"forward": forward, "backward": backward}
    yield Finding("ours", is_finite, f"{forward:.2f} + {backward:.2f} ms", figures)


def _compare_at(setup: Setup, package: Package, render: Render, n: int) -> Finding:
    """Render by both in turns at one size."""
    gaussians, camera = full_hd_scene(setup, n)
    weights = draw(camera.height, camera.width, 3).to(setup.place)
    renders: dict[str, Render] = {"ours": _ours, package.module: render}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in renders}
    last: dict[str, _Pass] = {}
    begun = time.perf_counter()
    for number in range(ROUNDS):
        if number > 1 and time.perf_counter() - begun > SECONDS:
            break
        for name, one in renders.items():
            last[name] = _pass(one, gaussians, camera, weights)
            if number > 0:
                times[name].append((last[name].forward, last[name].backward))
    medians: dict[str, dict[str, float]] = {}
    for name, rounds in times.items():
        forward, backward = [statistics.median(column) for column in zip(*rounds, strict=True)]
        medians[name] = {"forward": forward, "backward": backward, "sum": forward + backward}
    differences = _differences(last[package.module], last["ours"])
    ratio = medians["ours"]["sum"] / medians[package.module]["sum"]
    shown = "; ".join(
        f"{name} {ms['forward']:.2f} + {ms['backward']:.2f} ms" for name, ms in medians.items()
    )
    errors = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    figures: dict[str, Any] = {"ms": medians, "ratio": ratio, "differences": differences}
    is_same = max(differences.values()) <= MAX_DIFFERENCE
    text = f"{shown}; ours takes {ratio:.2f} of it; differences {errors}"
    return Finding(f"{n:,} Gaussians", is_same, text, figures)


def _against(package: Package) -> Callable[[Setup], Iterator[Finding]]:
    def run(setup: Setup) -> Iterator[Finding]:
        render = _installed(package, setup)
        for n in SIZES:
            try:
                yield _compare_at(setup, package, render, n)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                yield Finding(f"{n:,} Gaussians", True, "does not fit into this device's memory")
            release_cached(setup.place)

    return run


CHECKS = (
    Check("alone", alone),
    *(Check(package.module, _against(package), 240) for package in PACKAGES),
)
