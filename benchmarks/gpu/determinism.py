# SPDX-License-Identifier: Apache-2.0
"""The same inputs give the same bits on a device: each kernel, and a short training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    Check,
    Finding,
    Setup,
    large_cloud,
    large_scene,
)
from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.losses.photometric import color_loss
from gaussian_splatting.optim.moments import AdamStep, moment_format
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import build_tile_lists, project, rasterize
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.geometry import diamond_faces, diamond_vertices
from sugar_scene.mesh.triangle_rasterizer import rasterize_triangles
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils.neighbors import nearest_neighbors

EXTENT = 5.0


def _repeat(setup: Setup, what: str, work: Callable[[], list[Tensor]]) -> Finding:
    """Run several times and compare all bits with those of the first time."""
    first, differing = [t.detach().clone() for t in work()], 0
    rounds = setup.size(3, 2)
    for _ in range(rounds - 1):
        again = work()
        if [t.shape for t in again] != [t.shape for t in first]:
            return Finding(what, False, "not even the sizes agree")
        # NaN is not equal to itself, and would hide behind equal bits.
        differing += sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
    n = sum(t.numel() for t in first)
    shown = f"{n:,} values" + (
        f", {differing:,} differ" if differing else f", {rounds} times equal"
    )
    return Finding(what, not differing, shown, {"values": n, "differing": differing})


def _scene(setup: Setup) -> tuple[Gaussians, object]:
    width, height = setup.size(1920, 70), setup.size(1244, 50)
    return large_scene(setup.size(500_000, 600), width, height, setup.place)


def _random(*shape: int, setup: Setup, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(setup.place)


def rasterizer(setup: Setup) -> Iterator[Finding]:
    """Projection and lists, then images of seven channels and gradients of the Gaussians."""
    gaussians, camera = _scene(setup)

    def lists() -> list[Tensor]:
        found = project(gaussians, camera, depth=True, normal=True)
        tiles = build_tile_lists(found, blocks=True)
        return [found.splats, found.radii, tiles.offsets, tiles.ids, tiles.places]

    features = _random(len(gaussians), 1, setup=setup)
    weights = _random(camera.height, camera.width, 3, setup=setup)

    def images() -> list[Tensor]:
        leaves = gaussians.as_leaves()
        output = rasterize(leaves, camera, depth=True, normal=True, features=features)
        loss = (output.image * weights).sum() + output.depth.mean() + output.normal.mean()
        (loss + output.features.mean()).backward()
        return [output.image, output.depth, output.alpha, *(t.grad for t in leaves.tensors())]

    yield _repeat(setup, "projection and tile lists", lists)
    yield _repeat(setup, "images and gradients", images)


def values(setup: Setup) -> Iterator[Finding]:
    """Colour loss, fields with their gradients, neighbours, triangles, Adam."""
    height, width = setup.size(1244, 50), setup.size(1920, 70)
    target = _random(height, width, 3, setup=setup).sigmoid()
    image = _random(height, width, 3, setup=setup, seed=1).sigmoid()
    gaussians, camera = _scene(setup)
    parameters = (gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities)
    neighbors = nearest_neighbors(gaussians.means).indices
    n_samples = setup.size(1_000_000, 2_000)
    draws = torch.Generator().manual_seed(0)
    indices = torch.randint(len(gaussians), (n_samples,), generator=draws).sort().values
    indices, noise = indices.to(setup.place), _random(n_samples, 3, setup=setup)
    points = _random(setup.size(1_000_000, 2_000), 3, setup=setup)
    start, grad = (_random(len(gaussians), 45, setup=setup, seed=seed) for seed in (2, 3))

    def color() -> list[Tensor]:
        leaf = image.clone().requires_grad_()
        loss = color_loss(leaf, target)
        loss.backward()
        return [loss, leaf.grad]

    def fields() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in parameters]
        found = evaluate_fields(*leaves, neighbors, indices, noise, native=False)
        sum(f.mean() for f in found).backward()
        return [*found, *(leaf.grad for leaf in leaves)]

    def hits() -> list[Tensor]:
        corners = diamond_vertices(gaussians.means, gaussians.quats, gaussians.scales)
        faces = diamond_faces(len(gaussians), setup.place)
        found = rasterize_triangles(corners.reshape(-1, 3), faces, camera)
        return [found.face, found.depth.nan_to_num(posinf=0.0), found.barycentrics]

    def adam() -> list[Tensor]:
        kept = []
        for fmt in map(moment_format, ("fp32", "bf16", "8bit")):
            value = start.clone()
            moments = fmt.zeros(value)
            for count in (1, 2, 3):
                fmt.step(value, grad, moments, AdamStep(0.01, count, count))
            kept += [value, *moments.values()]
        return kept

    yield _repeat(setup, "colour loss", color)
    yield _repeat(setup, "fields", fields)
    yield _repeat(setup, "neighbours", lambda: list(nearest_neighbors(points)))
    yield _repeat(setup, "triangles", hits)
    yield _repeat(setup, "Adam", adam)


def _train(setup: Setup, made: tuple[GaussianCloud, object], config: CoarseConfig) -> list[Tensor]:
    """Twenty iterations across the prune and into the geometric terms; all parameters."""
    cloud, camera = made
    stage = CoarseStage(cloud.select(slice(None)), config, EXTENT, lambda message: None)
    target = (_random(camera.height, camera.width, 3, setup=setup).sigmoid() * 255).byte()
    for iteration in range(8_991, 9_011):
        stage.begin(iteration)
        stage.accumulate(iteration, camera, target).settle()
        stage.apply(iteration)
    return [p.detach() for p in stage.model.optimizer.parameters.values()]


def training(setup: Setup) -> Iterator[Finding]:
    """The coarse stage as a whole, in three configurations."""
    width, height = setup.size(960, 48), setup.size(622, 36)
    made = large_cloud(setup.size(200_000, 400), width, height, setup.place)
    samples = setup.size(200_000, 500)
    plain = {"sdf_samples": samples, "sample_chunk": samples}
    saving = {"split": ImageSplit(3, True), "sdf_samples": samples, "sample_chunk": samples // 2}
    for name, config in (
        ("dn_consistency", CoarseConfig(**plain)),
        ("sdf", CoarseConfig(regularization_type="sdf", **plain)),
        ("strips, chunks, bf16", CoarseConfig(optimizer=OptimizerConfig("bf16", True), **saving)),
    ):
        yield _repeat(
            setup, f"20 iterations, {name}", lambda config=config: _train(setup, made, config)
        )


CHECKS = (
    Check("rasterizer", rasterizer),
    Check("values", values, 120),
    Check("training", training, 120),
)
