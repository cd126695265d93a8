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
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gaussian_splatting.components.densification import Region
from gaussian_splatting.engine.stage import StepResources
from gaussian_splatting.engine.training_views import TrainingView

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.components.exposures import Exposures, LaterExposure
from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.memory_plan import MemoryPlan, ViewLoad, predicted_bytes
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import project, rasterize
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers import losses
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.neighbor_search import NeighborSearch
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig, RefineConfig
from sugar_trainers.stage_memory import stage_loads
from sugar_utils.entrypoint import run_main
from sugar_utils.flags import Parser, positive_int
from sugar_utils.memory import format_bytes, memory_usage, reset_peak
from tests.support import step_scenes
from tests.support.color_losses import color_loss
from tests.support.depth_normals import depth_normal_consistency
from tests.support.samples import draw_samples
from tests.support.step_scenes import Case, make_scene, photograph

EXTENT = 5.0
ITERATIONS = {"entropy": 8_000, "refine": 4_000}
"""Where other phases have 9,100. The refinement has all bands of the colour by then."""


@dataclass(frozen=True)
class Setting:
    """One measurement: a phase, see the top of this file, and the sizes and settings of its step.

    ``n`` counts Gaussians, which are one to a triangle in the refinement;
    ``mode`` is the regularisation of the coarse stage.
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
    exposure: bool = False

    @property
    def split(self) -> ImageSplit:
        return ImageSplit(self.strips)

    @property
    def iteration(self) -> int:
        return ITERATIONS.get(self.phase, 9_100)

    def config(self) -> CoarseConfig | MultiviewConfig | RefineConfig:
        common = {"split": self.split, "optimizer": self.optimizer}
        if self.phase == "refine":
            return RefineConfig(**common)
        if self.phase == "multiview":
            return MultiviewConfig(**common, multiview_pixels=self.samples)
        return CoarseConfig(
            **common,
            regularization_type=self.mode,
            full_res_normals=self.full_res_normals,
            sdf_samples=self.samples,
            sample_chunk=self.sample_chunk,
        )


@dataclass
class Weight:
    """Peak bytes alive in tensors, of the resident set, and as predicted; seconds of the step."""

    peak: int
    resident: int
    seconds: float
    predicted: int


def make_stage(
    setting: Setting, made: tuple[GaussianCloud, Camera] | None = None
) -> tuple[CoarseStage | RefineStage, Camera]:
    """The stage of a phase, neighbours searched where its step needs them.

    ``made`` are cloud and camera of a coarse stage, on the device to train on.
    """
    n, width, config = setting.n, setting.width, setting.config()
    if made is None:
        # Equally dense on screen whatever their number.
        radius = 4.4 * width / 1920 * (1e6 / n) ** 0.5
        size = 10 if setting.phase == "refine" else n
        scene, camera = make_scene(Case("memory", size, width, setting.height, 1, radius=radius))
        cloud = step_scenes.as_cloud(scene)
    else:
        cloud, camera = made
    learned = None
    if setting.exposure:
        learning = LaterExposure(exposure_compensation=True)
        learned = Exposures(learning, [camera.name], torch.device("cpu"), (1, 2))
    components = [] if learned is None else [learned]
    if setting.phase == "refine":
        bound = bind_to_mesh(*step_scenes.make_wall(n), 1, EXTENT)
        return RefineStage(bound, config, EXTENT, components=components), camera
    if setting.phase == "multiview":
        make = step_scenes.make_multiview_stage
        return make(cloud, camera, config, EXTENT, photograph, learned), camera
    stage = CoarseStage(cloud, config, Region(EXTENT), lambda message: None, components=components)
    if setting.phase in ("geometry", "naive"):
        stage.begin(setting.iteration)
    return stage, camera


def naive_step(stage: CoarseStage, config: CoarseConfig, camera: Camera, target: Tensor) -> None:
    """All terms in one graph."""
    gaussians: Gaussians = stage.model.cloud.activate()
    output = rasterize(gaussians, camera, depth=True, normal=True)
    loss = color_loss(output.image, target.float() / 255)
    lens = (camera.fx, camera.fy, camera.cx, camera.cy)
    consistency = depth_normal_consistency(output.depth, output.normal, *lens)
    loss = loss + config.dn_factor * consistency
    search = next(c for c in stage.components if isinstance(c, NeighborSearch))
    drawn = draw_samples(output.visible, config.samples_for(len(gaussians)), seed=0)
    fields = evaluate_fields(
        gaussians.means,
        gaussians.quats,
        gaussians.scales,
        gaussians.opacities,
        search.found(),
        *drawn,
    )
    density = losses.density_estimation_loss(fields.density, fields.plane_distance, fields.beta)
    loss = loss + config.estimation_factor * density
    (loss + config.normal_factor * losses.better_normal_loss(fields.normal_error)).backward()


def step(stage: CoarseStage | RefineStage, setting: Setting, camera: Camera, target: Tensor):
    """Run the measured part: one iteration, from learning rates to the optimiser's step."""
    if setting.phase == "naive":
        naive_step(stage, setting.config(), camera, target)
        return
    stage.begin(setting.iteration)
    if setting.phase != "neighbors":
        resources = StepResources(stage.memory_plan, is_only_view=True)
        view = TrainingView(camera, target, setting.iteration)
        stage.commit(stage.accumulate(view, resources))


def optimize(stage: CoarseStage | RefineStage) -> None:
    """One step with any gradient, so that there are moments."""
    for parameter in stage.model.optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    stage.model.optimizer.step()


def standing_tensors(stage: CoarseStage | RefineStage) -> list[Tensor]:
    """Parameters and moments, neighbours, and the topology of a mesh with Gaussians.

    Without what would lie on the host of a GPU.
    """
    optimizer = stage.model.optimizer
    found = [*optimizer.resident.values(), getattr(stage, "neighbors", None)]
    for name, moments in optimizer.moments().items():
        if name in optimizer.resident:
            found += moments.values()
    if isinstance(stage, RefineStage):
        owners = stage._placement, stage._placement.sums, stage._pairs, stage._pairs.sums
        found += [stage.model.cloud.faces, *(v for o in owners for v in vars(o).values())]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def peak_bytes(work: Callable[[], object]) -> int:
    """Run ``work``; the most bytes of tensors that were alive beyond those before it.

    The profiler of torch records every allocation and release, those inside operators included.
    Warp works on the memory of tensors, so this is all there is but for native stacks.
    """
    # Garbage of earlier work that is freed during the count would be subtracted.
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        work()
    changes, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack += node.children
        if hasattr(node.extra_fields, "alloc_size"):
            changes.append((node.start_time_ns, node.extra_fields.alloc_size))
    now = most = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        now += n_bytes
        most = max(most, now)
    return most


def predict_step(stage: CoarseStage | RefineStage, setting: Setting, camera: Camera) -> int:
    with torch.no_grad():
        views = [ViewLoad.of(project(stage.model.cloud.activate(), camera))]
    loads = stage_loads(stage.model.cloud, setting.config(), views)(setting.optimizer)
    load = loads.get(setting.phase, loads.get("geometry"))
    return predicted_bytes(load, MemoryPlan(setting.split, setting.sample_chunk))


def weigh_setting(setting: Setting) -> Weight:
    """Weigh one setting in this process, which should be a fresh one."""
    small = replace(setting, n=2_000, width=64, height=48, samples=100)
    stage, camera = make_stage(small)
    optimize(stage)
    # Kernels are compiled and loaded before anything is measured.
    step(stage, small, camera, photograph(camera))
    stage.model.optimizer.step()
    empty = memory_usage("cpu").current
    stage, camera = make_stage(setting)
    optimize(stage)
    target = photograph(camera)
    before = sum(tensor.nbytes for tensor in (target, *standing_tensors(stage)))
    predicted = predict_step(stage, setting, camera)
    reset_peak("cpu")
    started = time.perf_counter()
    peak = before + peak_bytes(lambda: step(stage, setting, camera, target))
    seconds = time.perf_counter() - started
    stage.model.optimizer.step()
    return Weight(peak, memory_usage("cpu").peak - empty, seconds, predicted)


def table_settings(args: argparse.Namespace) -> list[Setting]:
    """One setting changed at a time, from the naive step to everything that saves memory."""
    plain = Setting(
        "geometry",
        args.gaussians,
        args.width,
        args.height,
        samples=args.samples,
        sample_chunk=args.samples,
    )
    bfloat = OptimizerConfig("bf16", use_bfloat16=True)
    saving = {"strips": args.strips, "sample_chunk": args.samples // 4}
    changes = (
        {"phase": "naive"},
        {},
        {"full_res_normals": False},
        {"strips": args.strips},
        saving,
        {"optimizer": OptimizerConfig("bf16")},
        {"optimizer": bfloat},
        {"optimizer": bfloat, **saving},
        {"mode": "density"},
        {"mode": "sdf"},
        {"phase": "entropy"},
        {"phase": "neighbors"},
        {"phase": "multiview", "samples": 16_384, "sample_chunk": 16_384},
        {
            "phase": "multiview",
            "samples": 16_384,
            "sample_chunk": 16_384,
            "optimizer": OptimizerConfig(bands_on_host=True),
        },
        {"phase": "refine"},
        {"phase": "refine", "strips": args.strips},
    )
    return [replace(plain, **change) for change in changes]


def describe_setting(setting: Setting) -> str:
    """The phase, and what differs from the defaults."""
    moments, chunk = setting.optimizer.optimizer_state, setting.sample_chunk
    words = {
        setting.mode if setting.phase == "geometry" else setting.phase: True,
        f"{setting.strips} strips": setting.strips > 1,
        f"chunks of {chunk:,}": chunk < setting.samples,
        "half-size normals": not setting.full_res_normals,
        f"{moments} moments": moments != "fp32",
        "bfloat16 colours": setting.optimizer.use_bfloat16,
        "bands on the host": setting.optimizer.bands_on_host,
    }
    return ", ".join(word for word, said in words.items() if said)


def run(args: argparse.Namespace) -> None:
    print_machine()
    rows, naive = [], 0
    for setting in table_settings(args):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            weight = pool.apply(weigh_setting, (setting,))
        # The naive step comes first.
        naive = naive or weight.peak
        predicted = ["", ""]
        if setting.phase not in ("naive", "neighbors"):
            error = 100 * (weight.predicted / weight.peak - 1)
            predicted = [format_bytes(weight.predicted), f"{error:+.1f} %"]
        rows.append(
            [
                describe_setting(setting),
                format_bytes(weight.peak),
                f"{weight.peak / naive:.2f}",
                *predicted,
                format_bytes(weight.resident),
                f"{weight.seconds:.1f}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{args.gaussians:,} Gaussians, {args.width} x {args.height}\n")
    titles = ["step", "in tensors", "to naive", "predicted", "error", "resident set", "seconds"]
    print_table(titles, rows)


def main() -> None:
    parser = Parser(
        description="Peak memory of a step of each phase.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gaussians", type=positive_int, default=1_000_000, help="size of the cloud")
    add("--width", type=positive_int, default=1920, help="image width")
    add("--height", type=positive_int, default=1244, help="image height")
    add("--strips", type=positive_int, default=4, help="strips per image, where there are some")
    add("--samples", type=positive_int, default=1_000_000, help="samples around the surface")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
