# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a training step of each phase: ``python benchmarks/memory.py``.

A synthetic cloud with the statistics of trained models (``benchmarks/rasterizer.py``) goes through
a real step of each phase, the optimizer's included:

- ``entropy``, ``geometry``: the coarse stage, before and after iteration 9000;
- ``neighbors``: the neighbour search that begins the geometric iterations;
- ``multiview``: the coarse stage in multi-view mode, with a neighbouring view;
- ``refine``: mesh-bound Gaussians on a wavy wall;
- ``naive``: the terms of ``geometry`` in one graph, whole image, everything in float32.

Printed are the peak bytes alive in tensors, the prediction of the memory planner, and the peak of
the resident set of a process that does nothing else, with one setting changed at a time.
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

from benchmarks.live_bytes import peak_bytes
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.memory_plan import MemoryPlan, predicted_bytes, survey
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.losses.photometric import color_loss
from gaussian_splatting.optim.learned_exposure import Exposures, LaterExposure, exposures_of
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import rasterize
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.sampling import draw_samples
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
from sugar_trainers.stage_memory import stage_loads
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes, memory_usage, reset_peak
from tests.support.step_scenes import (
    Case,
    as_cloud,
    make_multiview_stage,
    make_scene,
    make_wall,
    photograph,
)

EXTENT = 5.0
ITERATIONS = {
    "entropy": 8_000, "neighbors": 9_100, "geometry": 9_100, "naive": 9_100, "multiview": 9_100,
}  # fmt: skip
REFINE_ITERATION = 4_000
"""Late enough for all bands of the colour."""


@dataclass(frozen=True)
class Setting:
    """What is weighed.

    Attributes:
        phase: See the top of this file.
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

    @property
    def geometry(self) -> str:
        """What is rendered besides colour, in the words of the memory model."""
        if self.phase == "multiview":
            return "planes"
        if self.mode == "dn_consistency":
            return "full" if self.full_res_normals else "half"
        return "depth" if self.mode == "sdf" else "none"

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
    """Peak bytes alive in tensors, of the resident set, and as predicted; seconds of the step."""

    peak: int
    resident: int
    seconds: float
    predicted: int


def make_cloud(setting: Setting) -> tuple[GaussianCloud, Camera]:
    """A wall, a ball and floaters, equally dense on screen whatever their number."""
    n, width = setting.n, setting.width
    radius = 4.4 * width / 1920 * (1e6 / n) ** 0.5
    gaussians, camera = make_scene(Case("memory", n, width, setting.height, 1, radius=radius))
    return as_cloud(gaussians), camera


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
        stage.accumulate(iteration, camera, target).commit()


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
    standing = [
        target, *model.parameters.values(), *fixed_tensors(stage),
        *(m for group in model.moments().values() for m in group.values()),
    ]  # fmt: skip
    neighbors = getattr(stage, "neighbors", None)
    before = sum(t.nbytes for t in [*standing, *([] if neighbors is None else [neighbors])])
    predicted = predict_step(stage, setting, camera)
    reset_peak("cpu")
    started = time.perf_counter()
    peak = before + peak_bytes(lambda: step(stage, setting, camera, target))
    seconds = time.perf_counter() - started
    model.step()
    return Weight(peak, memory_usage("cpu").peak - empty, seconds, predicted)


def weigh_alone(setting: Setting) -> Weight:
    """Weigh one setting in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(weigh_setting, (setting,))


def table_settings(args: argparse.Namespace) -> list[Setting]:
    """One setting changed at a time, from the naive step to everything that saves memory."""
    plain = Setting(
        "geometry", args.gaussians, args.width, args.height,
        samples=args.samples, sample_chunk=args.samples,
    )  # fmt: skip
    bfloat = OptimizerConfig("bf16", use_bfloat16=True)
    saving = {"strips": args.strips, "recompute": True, "sample_chunk": args.samples // 4}
    return [
        replace(plain, phase="naive"),
        plain,
        replace(plain, full_res_normals=False),
        replace(plain, strips=args.strips),
        replace(plain, recompute=True),
        replace(plain, **saving),
        replace(plain, optimizer=OptimizerConfig("bf16")),
        replace(plain, optimizer=OptimizerConfig("8bit")),
        replace(plain, optimizer=bfloat),
        replace(plain, optimizer=bfloat, **saving),
        replace(plain, mode="density"),
        replace(plain, mode="sdf"),
        replace(plain, phase="entropy"),
        replace(plain, phase="neighbors"),
        replace(plain, phase="multiview", samples=16_384, sample_chunk=16_384),
        replace(plain, phase="refine"),
        replace(plain, phase="refine", strips=args.strips),
    ]


def describe_setting(setting: Setting) -> str:
    """The phase, and what differs from the defaults."""
    words = [setting.phase if setting.phase != "geometry" else setting.mode]
    if setting.per_triangle > 1:
        words.append(f"{setting.per_triangle} Gaussians a triangle")
    if setting.strips > 1:
        words.append(f"{setting.strips} strips")
    if setting.recompute:
        words.append("checkpointing")
    if setting.sample_chunk < setting.samples:
        words.append(f"chunks of {setting.sample_chunk:,}")
    if not setting.full_res_normals:
        words.append("half-size normals")
    if setting.optimizer.optimizer_state != "fp32":
        words.append(f"{setting.optimizer.optimizer_state} moments")
    if setting.optimizer.use_bfloat16:
        words.append("bfloat16 colours")
    return ", ".join(words)


def run(args: argparse.Namespace) -> None:
    """Weigh what the flags ask for and print it."""
    about, rows, found, naive = print_machine(), [], [], 0
    for setting in table_settings(args):
        if args.only and describe_setting(setting) not in args.only:
            continue
        weight = weigh_alone(setting)
        found.append({"setting": asdict(setting), **asdict(weight)})
        if setting.phase == "naive":
            naive = weight.peak
        predicted = ["", ""]
        if setting.phase not in ("naive", "neighbors"):
            error = 100 * (weight.predicted / weight.peak - 1)
            predicted = [format_bytes(weight.predicted), f"{error:+.1f} %"]
        rows.append([
            describe_setting(setting), format_bytes(weight.peak),
            f"{weight.peak / naive:.2f}" if naive else "", *predicted,
            format_bytes(weight.resident), f"{weight.seconds:.1f}",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{args.gaussians:,} Gaussians, {args.width} x {args.height}\n")
    print_table(
        ["step", "in tensors", "to naive", "predicted", "error", "resident set", "seconds"], rows
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
    add("--only", nargs="+", metavar="STEP", help="these rows of the table; unset: all")
    add("--gaussians", type=positive_int, default=1_000_000, help="size of the cloud")
    add("--width", type=positive_int, default=1920, help="image width")
    add("--height", type=positive_int, default=1244, help="image height")
    add("--strips", type=positive_int, default=4, help="strips per image, where there are some")
    add("--samples", type=positive_int, default=1_000_000, help="samples around the surface")
    add("--json", type=Path, help="also write the figures to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
