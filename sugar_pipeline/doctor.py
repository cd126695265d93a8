# SPDX-License-Identifier: Apache-2.0
"""``train.py --doctor``: whether machine, scene and checkpoint will train, and what to fix."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, image_size
from gaussian_splatting.data.masks import MaskOptions, hull_of, overview
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.engine.memory_plan import surveyed
from gaussian_splatting.rasterization import project
from gaussian_splatting.rasterization.backends import choose_rasterizer
from gaussian_splatting.rasterization.self_test import reference_test
from sugar_capture.capture_check import check_capture
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_pipeline.plan import mode_of, train_plan
from sugar_pipeline.time_plan import TimePlan
from sugar_trainers.capture import SugarSize, load_views
from sugar_trainers.coarse_run import CoarseOptions, options_of_mode
from sugar_trainers.stage_memory import predict_coarse
from sugar_utils import device as devices
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.memory import available_bytes, format_bytes
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.settings import from_args, with_flags
from sugar_utils.warp_launch import WARP_VERSION

State = Literal["ok", "warning", "problem"]
TESTED_TORCH = ((2, 7), (2, 15))  # oldest and newest torch that the tests were run with
REQUIRED = ("numpy", "scipy", "pycolmap", "plyfile", "pillow", "rich", "msgspec", "psutil")
OPTIONAL = {
    "tensorboard": "curves of a run",
    "xatlas": "--texture_atlas xatlas",
    "lpips": "LPIPS in metrics.py",
    "viser": "view.py and --viewer",
}
BACKENDS = {"gsplat": "gsplat", "inria": "diff_gaussian_rasterization"}
MANY = 0.05  # share of Gaussians from which something is worth a warning
PERCENTILES = (1, 50, 99)
_NAMED = f"(percentiles {', '.join(map(str, PERCENTILES))})"


def run_doctor(args: argparse.Namespace) -> None:
    """Look at everything, print it with what to do, and train nothing."""
    console = Console()
    found = machine_findings(args.device, args.gpu, args.output_dir)
    show(console, "machine", found)
    if args.scene_path is not None:
        try:
            found += _capture_findings(args, console)
        except UserError as error:
            found.append(Finding("scene", "cannot be used", "problem", str(error)))
            show(console, "scene", found[-1:])
    n_problems = sum(finding.state == "problem" for finding in found)
    n_warnings = sum(finding.state == "warning" for finding in found)
    if n_problems:
        raise UserError(f"the doctor found {n_problems} problem(s), see the arrows above")
    console.info(f"no problems, {n_warnings} warning(s)")


def _capture_findings(args: argparse.Namespace, console: Console) -> list[Finding]:
    notes: list[str] = []
    if args.checkpoint_path is None:
        scene = load_scene(
            args.scene_path,
            size_rule=from_args(SugarSize, args),
            images_dir=args.images or "images",
            eval_split=args.eval,
            masks=from_args(MaskOptions, args),
            view_options=from_args(ViewOptions, args),
            notify=notes.append,
        )
    else:
        mode = options_of_mode(args.regularization_type or "dn_consistency")
        options = from_args(mode, args, output_dir=args.output_dir)
        checkpoint, scene = load_views(options, notes.append, require_images=True)
    mode, reason = mode_of(scene)
    starts_here = args.checkpoint_path is None
    found = [
        *scene_findings(scene, starts_here),
        *(Finding("note", note, "warning") for note in notes),
    ]
    found.append(Finding("mode", f"-r {mode} suits this capture: {reason}"))
    found += [Finding(what, where, "warning", do) for what, where, do in check_capture(scene)[0]]
    show(console, scene.description, found)
    if args.checkpoint_path is None:
        return found
    notes.clear()
    cloud = checkpoint.read_cloud(notes.append)
    if len(cloud) == 0:
        raise UserError(f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again")
    of_cloud = [*gaussian_findings(cloud, scene), *(Finding("note", n, "warning") for n in notes)]
    if scene.extent > 0:
        of_cloud.append(memory_finding(cloud, options, scene))
    show(console, str(checkpoint.ply_path), of_cloud)
    if args.minutes is not None:
        mode = args.regularization_type or mode
        chosen = with_flags(args, regularization_type=mode, stop_after=None)
        with ImageStore(options.config.white_background) as images:
            TimePlan(chosen, train_plan, {}, console).preview(images)
    return [*found, *of_cloud]


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    # A warning costs quality or time; with a problem, training fails or runs elsewhere than one
    # expects.
    state: State = "ok"
    advice: str = ""

    @classmethod
    def unless(cls, fault: bool, what: str, value: str, state: State, advice: str) -> Finding:
        """In order unless there is a fault; then in that state, with that advice."""
        return cls(what, value, state, advice) if fault else cls(what, value)


def show(console: Console, title: str, findings: Iterable[Finding]) -> None:
    rows = []
    for finding in findings:
        rows.append((finding.what, f"{finding.state:<8} {finding.value}"))
        if finding.advice:
            rows.append(("", f"         -> {finding.advice}"))
    console.table(title, rows)


LITTLE_MEMORY = 4 * 2**30
LITTLE_DISK = 10 * 2**30


def machine_findings(
    kind: str, gpu: int | None, output: Path, facts: devices.CudaFacts | None = None
) -> list[Finding]:
    facts = facts or devices.cuda_facts()
    found = [*_system(output), *_torch(facts)]
    for index, device in enumerate(facts.gpus):
        free = format_bytes(available_bytes(torch.device("cuda", index)) or 0)
        memory = f"{free} of {format_bytes(device.memory)} free"
        value = f"{device.name}, compute capability {device.version}, {memory}"
        found.append(Finding(f"GPU {index}", value))
    try:
        chosen = devices.choose_device(kind, gpu, facts)
    except UserError as error:
        return [*found, Finding("device", "none", "problem", str(error)), *_libraries()]
    # A driver means that there is a GPU: not to use it is hardly what its owner wants.
    missed = chosen.device.type == "cpu" and facts.driver and kind == "auto"
    advice = "the line above says how to fix it"
    found.append(Finding.unless(missed, "device", chosen.reason, "problem", advice))
    return [*found, *_rasterizers(chosen.device), *_libraries()]


def _system(output: Path) -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    free = available_bytes("cpu")
    if free is not None:
        advice = "close other programs; photographs and meshing need some"
        little = free < LITTLE_MEMORY
        value = format_bytes(free)
        yield Finding.unless(little, "free main memory", value, "warning", advice)
    folders = (output.resolve(), *output.resolve().parents)
    existing = next(folder for folder in folders if folder.is_dir())
    room = shutil.disk_usage(existing).free
    value = f"{format_bytes(room)} at {existing}"
    advice = "a million Gaussians take 0.7 GB in every checkpoint that is kept"
    yield Finding.unless(room < LITTLE_DISK, "free disk space", value, "warning", advice)


def _torch(facts: devices.CudaFacts) -> Iterator[Finding]:
    build = f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU-only build"
    oldest, newest = TESTED_TORCH
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    names = [".".join(map(str, end)) for end in TESTED_TORCH]
    untested = not oldest <= version <= newest
    value = f"{torch.__version__}, {build}"
    advice = f"tested with {names[0]} to {names[1]}; it may work all the same"
    yield Finding.unless(untested, "torch", value, "warning", advice)
    yield Finding("Warp", f"{wp.__version__}, kernels kept in {wp.config.kernel_cache_dir}")
    cuda = devices.driver_cuda_version() if facts.driver else None
    needed = (12, 0) if WARP_VERSION < (1, 18) else devices.MIN_DRIVER_CUDA
    advice = (
        f"the kernels need CUDA {devices.MIN_DRIVER_CUDA[0]}, so driver {devices.MIN_DRIVER} or "
        f"newer; {devices.INSTALL_DRIVER}; {devices.KEEP_DRIVER}"
    )
    supports = "" if cuda is None else f", supports CUDA up to {cuda[0]}.{cuda[1]}"
    value = f"found{supports}" if facts.driver else "none"
    old = cuda is not None and cuda < needed
    yield Finding.unless(old, "NVIDIA driver", value, "problem", advice)


def _rasterizers(device: torch.device) -> Iterator[Finding]:
    fault = reference_test(device)
    value = f"built in, {device.type}: {fault or 'agrees with the float64 reference'}"
    advice = "please report this, with the lines above"
    yield Finding.unless(fault is not None, "rasterizer warp", value, "problem", advice)
    for name, package in BACKENDS.items():
        what = f"{package} (--rasterizer {name})"
        if importlib.util.find_spec(package) is None:
            yield Finding(what, "not installed, not needed")
        elif device.type != "cuda":
            yield Finding(what, "installed; works on a GPU only")
        else:
            try:
                choose_rasterizer(name, device)
                yield Finding(what, "installed, passes its self-test")
            except UserError as error:
                yield Finding(what, "installed, cannot be used", "warning", str(error))


def _libraries() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        advice = "pip install -r requirements.txt"
        yield Finding.unless(version is None, name, version or "missing", "problem", advice)
    for name, purpose in OPTIONAL.items():
        yield Finding(name, f"{_version(name) or 'not installed'} ({purpose})")
    try:
        choose_backend("open3d")
        yield Finding("meshing", "open3d")
    except UserError as error:
        # Without it pycolmap meshes, which is fine; installed in vain it is not.
        in_vain = importlib.util.find_spec("open3d") is not None
        yield Finding.unless(in_vain, "meshing", "pycolmap", "warning", str(error))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


FEW_VIEWS = 20
FEW_POINTS = 100
LARGE_SHARE_OF_EXTENT = 0.5
SMALL_SHARE_OF_EXTENT = 1e-7


def scene_findings(scene: Scene, starts_from_points: bool = False) -> list[Finding]:
    """Report cameras, photographs, masks and points of a scene.

    Args:
        starts_from_points: Whether there is no checkpoint, so that training needs points.
    """
    n = len(scene.train_cameras)
    points = scene.points
    advice = f"fewer than {FEW_VIEWS} views seldom determine a surface; take more"
    value = f"{n} to train on, {len(scene.test_cameras)} held out"
    found = [Finding.unless(n < FEW_VIEWS, "cameras", value, "warning", advice)]
    advice = "all cameras stand in one place; take photographs from different positions"
    value = f"{scene.extent:.3g} world units"
    found.append(Finding.unless(scene.extent <= 0, "camera extent", value, "problem", advice))
    found += [*_photographs(scene), *_masks(scene)]
    advice = (
        "vanilla training starts from them; let COLMAP triangulate again, or pass a point cloud "
        "with --init_ply"
    )
    what = "points of the reconstruction"
    value = f"{len(points):,}"
    state: State = "problem" if starts_from_points and not len(points) else "warning"
    found.append(Finding.unless(len(points) < FEW_POINTS, what, value, state, advice))
    if len(points) > 1:
        distances = nearest_neighbors(torch.from_numpy(points), 2).sq_distances[:, 1].sqrt()
        value = f"{_percentiles(distances)} world units {_NAMED}"
        found.append(Finding("distance of neighbouring points", value))
    return found


def memory_finding(cloud: GaussianCloud, options: CoarseOptions, scene: Scene) -> Finding:
    """What coarse training would need, and with which plan."""
    what = "memory of coarse training"
    try:
        chosen = predict_coarse(cloud, options.config, options.memory, scene)
    except UserError as error:
        return Finding(what, "does not fit", "problem", str(error))
    if chosen is None:
        return Finding(what, "the system does not say what is free")
    return Finding(what, f"{format_bytes(chosen.peak)} at most; {chosen.lines()[0]}")


def _percentiles(values: Tensor) -> str:
    found = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return ", ".join(f"{value:.3g}" for value in found)


def _photographs(scene: Scene) -> Iterator[Finding]:
    cameras = [*scene.train_cameras, *scene.test_cameras]
    sizes = Counter((camera.width, camera.height) for camera in cameras)
    shown = ", ".join(f"{n} of {w} x {h}" for (w, h), n in sizes.most_common(3))
    more = f" and {len(sizes) - 3} other sizes" if len(sizes) > 3 else ""
    n_bytes = sum((3 + (c.mask is not None)) * c.width * c.height for c in cameras)
    yield Finding("training size", f"{shown}{more}; {format_bytes(n_bytes)} as bytes")
    broken = [camera.name for camera in cameras if not _opens(camera)]
    value = f"{len(broken)} of {len(cameras)} cannot be opened" if broken else "all can be opened"
    advice = f"copy them again: {', '.join(broken[:5])}"
    yield Finding.unless(bool(broken), "photographs", value, "problem", advice)


def _masks(scene: Scene) -> Iterator[Finding]:
    """What the masks of training views leave; nothing where there are none."""
    masked = [camera for camera in scene.train_cameras if camera.mask is not None]
    if not masked:
        return
    share = np.mean([overview(camera).mean() / 255 for camera in masked])
    n = len(masked)
    of = len(scene.train_cameras)
    value = f"{n} of {of}, mode {masked[0].mask.mode}; {share:.0%} of their pixels count"
    advice = "photographs without a mask count whole; make the others, or --masks none"
    yield Finding.unless(n < of, "masks", value, "warning", advice)
    hull = hull_of(scene.train_cameras)
    if hull is not None and len(scene.points):
        n_inside = int(hull.contains(torch.from_numpy(scene.points)).sum())
        what = "points inside of the masks"
        value = f"{n_inside:,} of {len(scene.points):,}"
        advice = "do the masks belong to these photographs? Else --mask_mode ignore or --masks none"
        yield Finding.unless(n_inside == 0, what, value, "problem", advice)


def _opens(camera: Camera) -> bool:
    """Whether the file of a photograph begins as an image does; nothing is decoded."""
    try:
        return camera.image_path is not None and image_size(camera.image_path)[0] > 0
    except UserError:
        return False


def gaussian_findings(cloud: GaussianCloud, scene: Scene) -> list[Finding]:
    """Size, shape and opacity of Gaussians, duplicates, and who sees them."""
    faint = float((cloud.opacity_logits < 0).float().mean())
    doubled = 1.0 - torch.unique(cloud.means, dim=0).shape[0] / len(cloud)
    with torch.no_grad():
        gaussians = cloud.activate()
        views = surveyed(scene.train_cameras)
        counts = [int((project(gaussians, view).radii > 0).sum()) for view in views]
    return [
        Finding("Gaussians", f"{len(cloud):,}"),
        *_sizes(cloud, scene.extent),
        Finding.unless(
            faint > 1 - MANY,
            "opacity below 0.5",
            f"{faint:.1%} now; what stays so until iteration 9000 is removed",
            "warning",
            "nearly everything is transparent; train the vanilla stage for longer",
        ),
        Finding.unless(
            doubled > MANY,
            "duplicates",
            f"{doubled:.2%} share their position with another",
            "warning",
            "the file may hold the scene twice",
        ),
        Finding.unless(
            min(counts) == 0,
            "visible",
            f"{min(counts):,} to {max(counts):,} Gaussians in {len(counts)} of the views",
            "warning" if max(counts) else "problem",
            "Gaussians and cameras live in different worlds: was the checkpoint trained on this "
            "scene?",
        ),
    ]


def _sizes(cloud: GaussianCloud, extent: float) -> Iterator[Finding]:
    scales = cloud.log_scales.exp()
    longest = _percentiles(scales.amax(dim=1).cpu())
    shortest = scales.amin(dim=1).cpu()
    value = f"{longest} world units {_NAMED}, shortest {_percentiles(shortest)}"
    yield Finding("longest axes", value)
    finite = torch.stack([t.flatten(1).isfinite().all(dim=1) for t in cloud.tensors().values()])
    bad = int((~finite.all(dim=0)).sum())
    advice = "the checkpoint is damaged or its training diverged; train it again"
    yield Finding.unless(bad > 0, "not finite", f"{bad:,} Gaussians", "problem", advice)
    huge = float((scales.amax(dim=1) > LARGE_SHARE_OF_EXTENT * extent).float().mean())
    point = float((scales.amax(dim=1) < SMALL_SHARE_OF_EXTENT * extent).float().mean())
    longer = f"{huge:.2%} longer than {LARGE_SHARE_OF_EXTENT:g} extents"
    value = f"{longer}, {point:.2%} shorter than {SMALL_SHARE_OF_EXTENT:g}"
    advice = "scene and checkpoint may differ in scale, or its training diverged"
    yield Finding.unless(max(huge, point) > MANY, "degenerate", value, "warning", advice)
