# SPDX-License-Identifier: Apache-2.0
"""The same inputs give the same bits on a device: the rasterizer, and a short training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from benchmarks.gpu.common import Check, Finding, Setup, draw
from benchmarks.gpu.training import resume
from gaussian_splatting.components.densification import Region
from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import build_tile_lists, project, rasterize
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.stage_config import CoarseConfig
from tests.support.step_scenes import large_cloud, large_scene

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
    told = f"{differing:,} differ" if differing else f"{rounds} times equal"
    figures = {"values": n, "differing": differing}
    return Finding(what, not differing, f"{n:,} values, {told}", figures)


def _scene(setup: Setup) -> tuple[Gaussians, object]:
    width, height = setup.size(1920, 70), setup.size(1244, 50)
    return large_scene(setup.size(500_000, 600), width, height, setup.place)


def rasterizer(setup: Setup) -> Iterator[Finding]:
    """Projection and lists, then images of seven channels and gradients of the Gaussians."""
    gaussians, camera = _scene(setup)

    def lists() -> list[Tensor]:
        found = project(gaussians, camera, depth=True, normal=True)
        tiles = build_tile_lists(found, blocks=True)
        return [found.splats, found.radii, tiles.offsets, tiles.ids, tiles.places]

    features = draw(len(gaussians), 1).to(setup.place)
    weights = draw(camera.height, camera.width, 3).to(setup.place)

    def images() -> list[Tensor]:
        leaves = gaussians.as_leaves()
        output = rasterize(leaves, camera, depth=True, normal=True, features=features)
        loss = (output.image * weights).sum() + output.depth.mean() + output.normal.mean()
        (loss + output.features.mean()).backward()
        return [output.image, output.depth, output.alpha, *(t.grad for t in leaves.tensors())]

    yield _repeat(setup, "projection and tile lists", lists)
    yield _repeat(setup, "images and gradients", images)


def _train(setup: Setup, made: tuple[GaussianCloud, object], config: CoarseConfig) -> list[Tensor]:
    """Twenty iterations across the prune and into the geometric terms; all parameters."""
    cloud, camera = made
    stage = CoarseStage(cloud.select(slice(None)), config, Region(EXTENT), lambda message: None)
    drawn = draw(camera.height, camera.width, 3).to(setup.place)
    target = (drawn.sigmoid() * 255).byte()
    for iteration in range(8_991, 9_011):
        stage.begin(iteration)
        stage.commit(stage.accumulate(TrainingView(camera, target, iteration)))
        stage.apply(iteration)
    return [p.detach() for p in stage.model.optimizer.parameters.values()]


def training(setup: Setup) -> Iterator[Finding]:
    """The coarse stage as a whole, in three configurations."""
    width, height = setup.size(960, 48), setup.size(622, 36)
    made = large_cloud(setup.size(200_000, 400), width, height, setup.place)
    samples = setup.size(200_000, 500)
    plain = {"sdf_samples": samples, "sample_chunk": samples}
    saving = {"split": ImageSplit(3), "sdf_samples": samples, "sample_chunk": samples // 2}
    for name, config in (
        ("dn_consistency", CoarseConfig(**plain)),
        ("sdf", CoarseConfig(regularization_type="sdf", **plain)),
        ("strips, chunks, bf16", CoarseConfig(optimizer=OptimizerConfig("bf16", True), **saving)),
    ):
        work = functools.partial(_train, setup, made, config)
        yield _repeat(setup, f"20 iterations, {name}", work)


CHECKS = (
    Check("resume", resume, 120),
    Check("rasterizer", rasterizer),
    Check("training", training, 120),
)
