# SPDX-License-Identifier: Apache-2.0
"""``--blocks auto``: one block, unless the memory plan says that the whole capture does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gaussian_splatting.core.cloud import MAX_SH_DEGREE
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model
from gaussian_splatting.data.colmap_files import n_images_of
from gaussian_splatting.data.masks import FOUND, NONE
from gaussian_splatting.engine.memory_plan import (
    MemoryPlan,
    ModelLoad,
    StepLoad,
    ViewLoad,
    predicted_bytes,
    usable_bytes,
)
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.scenes.scene import Scene, load_scene
from sugar_capture.features.photographs import picture_files
from sugar_capture.scene_folder import find_source, needs_cameras, original_masks, scene_root
from sugar_pipeline.pipeline.plan import PipelinePlan, with_cameras
from sugar_trainers.coarse_run import CoarseOptions
from sugar_utils.console import Console
from sugar_utils.errors import say_nothing
from sugar_utils.flags import AUTO, FlagValues
from sugar_utils.memory import format_bytes

PIXELS_PER_GAUSSIAN = 100
"""Pixels of all photographs for each Gaussian of a trained model.

Published models of the captures of mip-NeRF 360 have one for 50 (gardens) to 200 (rooms).
"""
ALONE = ("minutes", "gs_output_dir", "init_ply", "depths", "normals")
"""Flags that speak of the whole capture in a way that its blocks cannot follow."""
OBJECT_MASKS = (
    "masks of an object do not go with blocks; an object fits into one. Pass --mask_mode ignore if "
    "the masks hide what is in the way"
)

_PIXELS_PER_VISIBLE = 4  # of a view, for each Gaussian that it shows
_TILES = 8  # tiles that a Gaussian is in
_SIDES = {"sh_dc": (1, 3), "sh_rest": ((MAX_SH_DEGREE + 1) ** 2 - 1, 3)}
_SIDES |= {"means": (3,), "quats": (4,), "log_scales": (3,), "opacity_logits": (1,)}


def is_divided(plan: PipelinePlan) -> bool:
    """Whether a plan is one of a capture in several blocks."""
    return plan.flags["blocks"] not in (AUTO, 1)


def with_number(plan: PipelinePlan, console: Console) -> PipelinePlan:
    """Return a plan with the number of blocks that fit into memory, where it is automatic.

    It follows from the pixels of the photographs, whose camera poses may have to be computed. A
    plan for one block keeps its flags.
    """
    if plan.flags["blocks"] != AUTO or flags_of_whole(plan.flags):
        return plan
    if asks_for_object_masks(plan.flags):
        return plan
    options = plan.coarse
    budget = usable_bytes(options.memory, options.compute.device, held=0)
    if budget is None or _surely_fits(plan.flags, options, budget):
        return plan
    plan = with_cameras(plan, console)
    scene = read_capture(plan)
    if reason_for_one_block(scene) is not None:
        return plan
    n_gaussians = expected_gaussians(scene.train_cameras, plan.flags["max_gaussians"])
    view = scene.train_cameras[0]
    n_bytes = training_bytes(n_gaussians, view.width, view.height, _optimizer(options))
    n_blocks = math.ceil(n_bytes / budget)
    if n_blocks == 1:
        return plan
    console.headline(
        f"--blocks {n_blocks}: up to {n_gaussians:,} Gaussians are expected of "
        f"{len(scene.train_cameras):,} photographs, which take {format_bytes(n_bytes)} of the "
        f"{format_bytes(budget)} that are free; --blocks 1 trains them whole"
    )
    return replace(plan, flags=plan.flags.replaced(blocks=n_blocks))


def expected_gaussians(cameras: Sequence[Camera], limit: int | None) -> int:
    """Return the most Gaussians that are expected of photographs."""
    n_pixels = sum(camera.n_pixels for camera in cameras)
    expected = math.ceil(n_pixels / PIXELS_PER_GAUSSIAN)
    return expected if limit is None else min(expected, limit)


def training_bytes(n: int, width: int, height: int, optimizer: OptimizerConfig) -> int:
    """Return the predicted bytes of a step on a number of Gaussians and a view of a size."""
    row = torch.empty(1, device="cpu")
    tensors = {name: row.expand(n, *sides) for name, sides in _SIDES.items()}
    visible = min(n, width * height // _PIXELS_PER_VISIBLE)
    view = ViewLoad(width, height, visible, _TILES * visible)
    load = StepLoad(n, ModelLoad.of(tensors, optimizer), view, geometry="planes")
    return predicted_bytes(load, MemoryPlan())


def _surely_fits(flags: FlagValues, options: CoarseOptions, budget: int) -> bool:
    """Whether a capture of so many photographs fits whatever their size; nothing is read."""
    n_photographs = count_photographs(flags)
    if n_photographs is None:
        return False
    side = options.size.img_size_limit
    n_gaussians = n_photographs * side * side // PIXELS_PER_GAUSSIAN
    return training_bytes(n_gaussians, side, side, _optimizer(options)) <= budget


def _optimizer(options: CoarseOptions) -> OptimizerConfig:
    """The formats of the optimiser; vanilla training keeps bands on the host if told to alone."""
    on_host = options.memory.keeps_bands_on_host(options.compute.device)
    return replace(options.config.optimizer, bands_on_host=on_host)


def count_photographs(flags: FlagValues) -> int | None:
    """Number of the photographs of a capture; None where they have to be read to be counted."""
    model = find_model(scene_root(flags["scene_path"]))
    if model is not None:
        return n_images_of(model)
    if not needs_cameras(flags["scene_path"]):
        return None
    source = find_source(flags["scene_path"])
    if source.video is not None:
        return flags["frames"]
    return len(picture_files(source.folder, source.recursive))


def flags_of_whole(flags: FlagValues) -> list[str]:
    """Return the flags that were given and that the blocks of a capture cannot follow."""
    given = flags.given
    return [f"--{name}" for name in ALONE if given.get(name, NONE) != NONE]


def asks_for_object_masks(flags: FlagValues) -> bool:
    """Whether masks of an object are certain before the capture is read.

    They are named by flags, or lie beside images whose cameras are yet to be found. Those that are
    estimated are always of an object.
    """
    if flags["masks"] in FOUND:
        return True
    if flags["mask_mode"] != "object" or flags["masks"] == NONE:
        return False
    if flags["masks"] is not None:
        return True
    if not needs_cameras(flags["scene_path"]):
        return False
    source = find_source(flags["scene_path"])
    return original_masks(source, None).name is not None


def read_capture(plan: PipelinePlan) -> Scene:
    """Read the whole capture as its training does, with masks and maps of its folder."""
    vanilla = plan.vanilla
    assert vanilla is not None, "no checkpoint is given, so one is trained"
    return load_scene(
        vanilla.source_path,
        size_rule=plan.coarse.size,
        images_dir=vanilla.images,
        eval_split=vanilla.eval,
        masks=vanilla.mask_options,
        depths=vanilla.depth_options,
        normals=plan.coarse.normal_options,
        view_options=vanilla.view_options,
        notify=say_nothing,
    )


def reason_for_one_block(scene: Scene) -> str | None:
    """Return the reason why a capture cannot be cut into blocks; None if it can."""
    cameras = scene.cameras
    if any(camera.shows_object for camera in cameras):
        return OBJECT_MASKS
    maps = {"depth": scene.depths.maps, "normal": scene.normals.maps}
    for kind, of_kind in maps.items():
        if of_kind:
            folder = next(iter(of_kind.values())).path.parent
            return f"{kind} maps do not go with blocks, and {folder} has some; pass --{kind}s none"
    return None
