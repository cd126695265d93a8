# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a training step of each phase: ``python benchmarks/memory.py``.

A synthetic cloud with the statistics of trained models (see ``benchmarks/rasterizer.py``; splats
shrink as their number grows, so that they overlap equally much) goes through a real step of each
phase, the optimiser's included. Phases:

- ``entropy``, ``geometry``: the coarse stage with dn_consistency, before and after iteration 9000;
- ``neighbors``: the neighbour search that begins the geometric iterations;
- ``multiview``: the coarse stage in multi-view mode, beside a neighbouring view;
- ``refine``: mesh-bound Gaussians on a wavy wall;
- ``naive``: the terms of ``geometry`` in one graph, whole image, everything in float32.

Counted are the bytes alive in tensors, by category, allocation by allocation; and the peak of the
resident set of a process that does nothing else, less what it holds before the cloud exists.
Beside them stands what :mod:`gaussian_splatting.engine.memory_plan` predicts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes, named_regions, weigh
from benchmarks.rasterizer import (
    Case,
    as_cloud,
    describe_machine,
    make_scene,
    print_machine,
    print_table,
)
from benchmarks.step_scenes import make_multiview_stage, make_wall
from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine import strips
from gaussian_splatting.engine.memory_plan import (
    MemoryPlan,
    predicted_bytes,
    survey,
)
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.losses.photometric import color_loss
from gaussian_splatting.optim.learned_exposure import Exposures, LaterExposure, exposures_of
from gaussian_splatting.optim.optimizer_config import STATE_FORMATS, OptimizerConfig
from gaussian_splatting.rasterization import rasterize, rasterizers
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.mesh.mesh_normals import PairsOfTriangles
from sugar_scene.mesh_bound import Placement, bind_to_mesh
from sugar_scene.sampling import draw_samples
from sugar_trainers import coarse_stage, multiview_stage, refine_stage
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.losses import (
    better_normal_loss,
    density_estimation_loss,
    depth_normal_consistency,
)
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.sampling_block import SurfaceSampler
from sugar_trainers.stage_memory import stage_loads
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, boolean, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes, memory_usage, reset_peak

EXTENT = 5.0
ITERATIONS = {
    "entropy": 8_000, "neighbors": 9_100, "geometry": 9_100, "naive": 9_100, "multiview": 9_100,
}  # fmt: skip
PHASES = ("entropy", "neighbors", "geometry", "naive", "multiview", "refine")
REFINE_ITERATION = 4_000
"""Late enough for all bands of the colour."""

REGIONS = {
    "projection": [
        (coarse_stage, "project"),
        (multiview_stage, "project"),
        (refine_stage, "project"),
        (strips.SplatGradients, "zeros"),
    ],
    "tile lists": [(rasterizers, "build_tile_lists"), (rasterizers, "backpropagate_rows")],
    "pixels": [(rasterizers, "blend_rows"), (strips, "_pixel_gradients")],
    "pixel losses": [(strips, "_evaluate")],
    "sampling": [(SurfaceSampler, "backward")],
    "activation": [(GaussianCloud, "activate"), (Placement, "place"), (Placement, "pull")],
    "bending": [(PairsOfTriangles, "errors_and_pull")],
}


@dataclass(frozen=True)
class Setting:
    """What is weighed.

    Attributes:
        phase: One of ``PHASES``.
        n: Gaussians.
        width: Image width in pixels.
        height: Image height in pixels.
        strips: Strips per image.
        full_res_normals: Normals at the size of the image.
        samples: Points sampled around the surface.
        sample_chunk: Of them at once.
        optimizer: How values and moments are stored.
        mode: Regularisation of the coarse stage.
        recompute: Gradient checkpointing.
        per_triangle: Gaussians on a triangle of the refinement; ``n`` counts triangles there.
        exposure: Whether exposures are learned.
    """

    phase: str
    n: int
    width: int
    height: int
    strips: int = 1
    full_res_normals: bool = True
    samples: int = 1_000_000
    sample_chunk: int = 1_000_000
    optimizer: OptimizerConfig = OptimizerConfig()
    mode: str = "dn_consistency"
    recompute: bool = False
    per_triangle: int = 1
    exposure: bool = False

    @property
    def split(self) -> ImageSplit:
        """How the memory of one view is saved."""
        return ImageSplit(self.strips, self.recompute)

    def coarse_config(self) -> CoarseConfig:
        """Settings of the coarse stage."""
        return CoarseConfig(
            regularization_type=self.mode,
            full_res_normals=self.full_res_normals,
            sdf_samples=self.samples,
            sample_chunk=self.sample_chunk,
            split=self.split,
            optimizer=self.optimizer,
        )


@dataclass
class Weight:
    """What was found.

    Attributes:
        live: Bytes of tensors at the peak, by category.
        resident: Peak of the resident set beyond that before the cloud was made.
        seconds: Of the step.
        predicted: What was predicted.
    """

    live: LiveBytes
    resident: int
    seconds: float
    predicted: int = 0


def make_cloud(setting: Setting) -> tuple[GaussianCloud, Camera]:
    """A wall, a ball and floaters, equally dense on screen whatever their number."""
    n, width = setting.n, setting.width
    radius = 4.4 * width / 1920 * (1e6 / n) ** 0.5
    gaussians, camera = make_scene(Case("memory", n, width, setting.height, 1, radius=radius))
    return as_cloud(gaussians), camera


def photograph(camera: Camera) -> Tensor:
    """Bytes without meaning. (H, W, 3)"""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(256, (camera.height, camera.width, 3), generator=rng, dtype=torch.uint8)


def exposures(setting: Setting, camera: Camera) -> Exposures | None:
    """That of the one photograph, where exposures are learned."""
    config = LaterExposure(exposure_compensation=setting.exposure)
    return exposures_of(config, [camera.name], torch.device("cpu"), (1, 2))


def make_stage(
    setting: Setting, made: tuple[GaussianCloud, Camera] | None = None
) -> tuple[CoarseStage | RefineStage, Camera]:
    """The stage of a phase, neighbours searched where its step needs them.

    Args:
        setting: What is weighed.
        made: Cloud and camera of a coarse stage, on the device to train on; made here if None.
    """
    if setting.phase == "refine":
        camera = make_scene(Case("view", 10, setting.width, setting.height, 1))[1]
        config = RefineConfig(split=setting.split, optimizer=setting.optimizer)
        bound = bind_to_mesh(*make_wall(setting.n), setting.per_triangle, EXTENT)
        return RefineStage(bound, config, EXTENT, exposures=exposures(setting, camera)), camera
    cloud, camera = made or make_cloud(setting)
    if setting.phase == "multiview":
        config = MultiviewConfig(
            split=setting.split, optimizer=setting.optimizer, multiview_pixels=setting.samples
        )
        learned = exposures(setting, camera)
        return make_multiview_stage(cloud, camera, config, EXTENT, photograph, learned), camera
    stage = CoarseStage(
        cloud,
        setting.coarse_config(),
        EXTENT,
        lambda message: None,
        exposures=exposures(setting, camera),
    )
    if setting.phase in ("geometry", "naive"):
        stage.begin(ITERATIONS[setting.phase])
    return stage, camera


def naive_step(stage: CoarseStage, config: CoarseConfig, camera: Camera, target: Tensor) -> None:
    """All terms in one graph."""
    gaussians: Gaussians = stage.model.cloud.activate()
    output = rasterize(gaussians, camera, depth=True, normal=True)
    loss = color_loss(output.image, target.float() / 255)
    intrinsics = (camera.fx, camera.fy, camera.cx, camera.cy)
    loss = loss + config.dn_factor * depth_normal_consistency(
        output.depth, output.normal, *intrinsics
    )
    drawn = draw_samples(output.visible, config.samples_for(len(gaussians)), seed=0)
    fields = evaluate_fields(
        gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities,
        stage.neighbors, *drawn,
    )  # fmt: skip
    density = density_estimation_loss(fields.density, fields.plane_distance, fields.beta)
    loss = loss + config.estimation_factor * density
    (loss + config.normal_factor * better_normal_loss(fields.normal_error)).backward()


def step(stage: CoarseStage | RefineStage, setting: Setting, camera: Camera, target: Tensor):
    """What is weighed: one iteration, from learning rates to the optimiser's step."""
    iteration = ITERATIONS.get(setting.phase, REFINE_ITERATION)
    if setting.phase == "naive":
        naive_step(stage, setting.coarse_config(), camera, target)
        return
    stage.begin(iteration)
    if setting.phase != "neighbors":
        stage.accumulate(iteration, camera, target).settle()


def optimize(stage: CoarseStage | RefineStage) -> None:
    """One step with any gradient, so that there are moments."""
    for parameter in stage.model.optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    stage.model.optimizer.step()


def fixed_tensors(stage: CoarseStage | RefineStage) -> list[Tensor]:
    """Topology of the mesh that Gaussians are bound to."""
    if not isinstance(stage, RefineStage):
        return []
    owners = stage._placement, stage._placement._sums, stage._pairs, stage._pairs._sums
    values = [value for owner in owners for value in vars(owner).values()]
    return [stage.model.cloud.faces, *(v for v in values if isinstance(v, Tensor))]


def predict_step(stage: CoarseStage | RefineStage, setting: Setting, camera: Camera) -> int:
    """Bytes that the planner expects."""
    with torch.no_grad():
        views = survey(stage.model.cloud.activate(), [camera])
    if setting.phase == "refine":
        config = RefineConfig()
    elif setting.phase == "multiview":
        config = MultiviewConfig()
    else:
        config = setting.coarse_config()
    loads = stage_loads(stage.model.cloud, config, views)(setting.optimizer)
    load = loads.get(setting.phase, loads.get("geometry"))
    return predicted_bytes(load, MemoryPlan(setting.split, setting.sample_chunk))


def weigh_setting(setting: Setting) -> Weight:
    """Weigh one setting in this process, which should be a fresh one."""
    small = Setting(**{**vars(setting), "n": 2_000, "width": 64, "height": 48, "samples": 100})
    stage, camera = make_stage(small)
    optimize(stage)
    # Kernels are compiled and loaded before anything is measured.
    step(stage, small, camera, photograph(camera))
    stage.model.optimizer.step()
    empty = memory_usage("cpu").current
    stage, camera = make_stage(setting)
    optimize(stage)
    model, target = stage.model.optimizer, photograph(camera)
    standing = {
        "parameters": sum(p.nbytes for p in model.parameters.values()),
        "moments": sum(m.nbytes for group in model.moments().values() for m in group.values()),
        "neighbors": 0 if getattr(stage, "neighbors", None) is None else stage.neighbors.nbytes,
        "photograph": target.nbytes,
        "mesh": sum(t.nbytes for t in fixed_tensors(stage)),
    }
    predicted = predict_step(stage, setting, camera)
    reset_peak("cpu")
    started = time.perf_counter()

    def made() -> dict[str, list[Tensor]]:
        own = [] if standing["neighbors"] else [getattr(stage, "neighbors", None)]
        return {
            "gradients": list(model.gradients().values()),
            "neighbors": [t for t in own if t is not None],
        }

    with named_regions(REGIONS):
        _, live = weigh(lambda: step(stage, setting, camera, target), made)
    seconds = time.perf_counter() - started
    model.step()
    parts = {name: n + live.parts.get(name, 0) for name, n in standing.items()}
    live = LiveBytes(live.peak + sum(standing.values()), {**live.parts, **parts})
    resident = memory_usage("cpu").peak - empty
    return Weight(live, resident, seconds, predicted)


def weigh_alone(setting: Setting) -> Weight:
    """Weigh one setting in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(weigh_setting, (setting,))


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """All phases that were asked for, with the flags given."""
    return [
        Setting(
            phase, args.gaussians, args.width, args.height,
            strips=1 if phase == "naive" else args.strips,
            full_res_normals=args.full_res_normals,
            samples=args.samples,
            sample_chunk=args.samples if phase == "naive" else args.sample_chunk or args.samples,
            optimizer=OptimizerConfig() if phase == "naive"
            else OptimizerConfig(args.optimizer_state, args.use_bfloat16),
        )
        for phase in args.phases.split(",")
    ]  # fmt: skip


def table_settings(args: argparse.Namespace) -> list[Setting]:
    """One thing changed at a time, from the naive step to everything that saves memory."""
    plain = Setting(
        "geometry", args.gaussians, args.width, args.height,
        samples=args.samples, sample_chunk=args.samples,
    )  # fmt: skip
    quarter = args.samples // 4
    bfloat = OptimizerConfig("bf16", use_bfloat16=True)
    return [
        replace(plain, phase="naive"),
        plain,
        replace(plain, sample_chunk=quarter),
        replace(plain, full_res_normals=False),
        replace(plain, strips=4),
        replace(plain, recompute=True),
        replace(plain, strips=4, recompute=True, sample_chunk=quarter),
        replace(plain, optimizer=OptimizerConfig("bf16")),
        replace(plain, optimizer=OptimizerConfig("8bit")),
        replace(plain, optimizer=bfloat),
        replace(plain, optimizer=bfloat, strips=4, recompute=True, sample_chunk=quarter),
        replace(plain, mode="density"),
        replace(plain, mode="sdf"),
        replace(plain, mode="sdf", strips=4, sample_chunk=quarter),
        replace(plain, phase="entropy"),
        replace(plain, phase="refine"),
        replace(plain, phase="refine", strips=4),
        replace(plain, phase="refine", n=args.gaussians // 6, per_triangle=6),
    ]


def describe_setting(setting: Setting, base: Setting) -> str:
    """What differs from another setting."""
    words = [setting.phase if setting.phase != "geometry" else setting.mode]
    if setting.per_triangle > 1:
        words.append(f"{setting.per_triangle} Gaussians a triangle")
    if setting.strips > 1:
        words.append(f"{setting.strips} strips")
    if setting.recompute:
        words.append("checkpointing")
    if setting.sample_chunk != base.sample_chunk:
        words.append(f"chunks of {setting.sample_chunk:,}")
    if not setting.full_res_normals:
        words.append("half-size normals")
    if setting.optimizer.optimizer_state != "fp32":
        words.append(f"{setting.optimizer.optimizer_state} moments")
    if setting.optimizer.use_bfloat16:
        words.append("bfloat16 colours")
    return ", ".join(words)


def compare_settings(args: argparse.Namespace) -> None:
    """Weigh the settings of the table and print them side by side."""
    settings, rows, found = table_settings(args), [], []
    naive = 0
    for setting in settings:
        weight = weigh_alone(setting)
        found.append({"setting": asdict(setting), **asdict(weight)})
        naive = naive or weight.live.peak
        predicted = ["", ""]
        if setting.phase != "naive":
            error = 100 * (weight.predicted / weight.live.peak - 1)
            predicted = [format_bytes(weight.predicted), f"{error:+.1f} %"]
        rows.append([
            describe_setting(setting, settings[0]), format_bytes(weight.live.peak),
            f"{weight.live.peak / naive:.2f}", *predicted, format_bytes(weight.resident),
            f"{weight.seconds:.1f}",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{args.gaussians:,} Gaussians, {args.width} x {args.height}\n")
    print_table(
        ["step", "in tensors", "to naive", "predicted", "error", "resident set", "seconds"], rows
    )
    if args.json:
        write_json_atomic(args.json, {"about": describe_machine(), "found": found})


def run(args: argparse.Namespace) -> None:
    """Weigh what the flags ask for and print it."""
    if args.table:
        compare_settings(args)
        return
    about, found = print_machine(), []
    for setting in settings_of(args):
        weight = weigh_alone(setting)
        found.append({"setting": asdict(setting), **asdict(weight)})
        print(
            f"\n{setting.phase}: {format_bytes(weight.live.peak)} alive in tensors, resident set "
            f"{format_bytes(weight.resident)}, {weight.seconds:.1f} s",
            flush=True,
        )
        if setting.phase not in ("naive", "neighbors"):
            error = 100 * (weight.predicted / weight.live.peak - 1)
            print(f"predicted: {format_bytes(weight.predicted)} ({error:+.1f} %)")
        rows = sorted(weight.live.parts.items(), key=lambda item: -item[1])
        print_table(
            ["what", "bytes", "per Gaussian"],
            [[name, format_bytes(n), f"{n / setting.n:.1f}"] for name, n in rows if n],
        )
    if args.json:
        write_json_atomic(args.json, {"about": about, "found": found})
        print(f"written: {args.json}")


def main() -> None:
    """Parse the flags and run."""
    parser = Parser(
        description="Peak memory of a step of each phase.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--phases", default=",".join(PHASES), help="phases, separated by commas")
    add("--table", action="store_true", help="a list of settings side by side instead")
    add("--gaussians", type=positive_int, default=1_000_000, help="size of the cloud")
    add("--width", type=positive_int, default=1920, help="image width")
    add("--height", type=positive_int, default=1244, help="image height")
    add("--strips", type=positive_int, default=1, help="strips per image")
    add("--full_res_normals", type=boolean, default=True, help="normals at the image's size")
    add("--samples", type=positive_int, default=1_000_000, help="samples around the surface")
    add("--sample_chunk", type=positive_int, help="samples at once; unset: all")
    add("--optimizer_state", choices=STATE_FORMATS, default="fp32", help="format of moments")
    add("--use_bfloat16", type=boolean, default=False, help="colour bands 1 to 3 in bfloat16")
    add("--json", type=Path, help="also write the figures to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
