# SPDX-License-Identifier: Apache-2.0
"""``train.py --doctor``: check machine, scene and checkpoint, and say what to fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, image_size
from gaussian_splatting.data.masks import MaskOptions, hull_of, overview
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.memory_plan import surveyed
from gaussian_splatting.rasterization import project
from gaussian_splatting.rasterization.backends import choose_rasterizer
from gaussian_splatting.rasterization.self_test import reference_test
from gaussian_splatting.scenes.scene import Scene, load_scene
from sugar_capture.conversion.capture_check import check_capture
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_pipeline.pipeline.plan import mode_of, plan_of
from sugar_pipeline.timing.time_plan import TimePlan
from sugar_trainers.capture import SugarSize, load_views
from sugar_trainers.coarse_run import CoarseOptions, options_of_mode
from sugar_trainers.stage_memory import predict_coarse
from sugar_utils import device as devices
from sugar_utils.command_text import command_text
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.flags import FlagValues
from sugar_utils.memory import available_bytes, format_bytes
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.settings import from_args
from sugar_utils.warp_launch import WARP_VERSION

State = Literal["ok", "warning", "problem"]
TESTED_TORCH = ((2, 7), (2, 15))  # oldest and newest torch that the tests were run with
REQUIRED = (
    "numpy",
    "scipy",
    "pycolmap",
    "msgspec",
    "zstandard",
    "plyfile",
    "pillow",
    "av",
    "filelock",
    "psutil",
    "jinja2",
    "rich",
    "trimesh",
)
OPTIONAL = {
    "tensorboard": "curves of a run",
    "xatlas": "--texture_atlas xatlas",
    "lpips": f"LPIPS in {command_text('metrics')}",
    "viser": f"{command_text('view')} and --viewer",
}
"""Packages that a run does without, and what needs them; all but lpips are in the requirements."""
BACKENDS = {"gsplat": "gsplat", "inria": "diff_gaussian_rasterization"}
MANY = 0.05  # share of Gaussians from which something is worth a warning
PERCENTILES = (1, 50, 99)
PERCENTILES_TEXT = f"(percentiles {', '.join(map(str, PERCENTILES))})"
# Below these, a warning.
LITTLE_MEMORY = 4 * 2**30  # bytes
LITTLE_DISK = 10 * 2**30  # bytes
FEW_VIEWS = 20
FEW_POINTS = 100
# Longest axes of Gaussians outside of these, in camera extents, are degenerate.
LARGE_SHARE_OF_EXTENT = 0.5
SMALL_SHARE_OF_EXTENT = 1e-7


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a check, its value, and how to fix it."""

    what: str
    value: str
    # A warning costs quality or time; with a problem, training fails or runs elsewhere than one
    # expects.
    state: State = "ok"
    advice: str = ""

    @classmethod
    def unless(cls, fault: bool, what: str, value: str, state: State, advice: str) -> Finding:
        """Make a finding that is in order, or, where there is a fault, has a state and advice."""
        return cls(what, value, state, advice) if fault else cls(what, value)


def run_doctor(flags: FlagValues) -> None:
    """Check everything, print the findings, and train nothing.

    Raises:
        UserError: There is a problem.
    """
    console = Console()
    findings = machine_findings(flags["device"], flags["gpu"], flags["output_dir"])
    show(console, "machine", findings)
    if flags["scene_path"] is not None:
        try:
            findings += _capture_findings(flags, console)
        except UserError as error:
            failure = Finding("scene", "cannot be used", "problem", str(error))
            findings.append(failure)
            show(console, "scene", [failure])
    n_problems = sum(finding.state == "problem" for finding in findings)
    n_warnings = sum(finding.state == "warning" for finding in findings)
    if n_problems:
        raise UserError(f"the doctor found {n_problems} problem(s), see the arrows above")
    console.info(f"no problems, {n_warnings} warning(s)")


def _capture_findings(flags: FlagValues, console: Console) -> list[Finding]:
    """Check and print the scene, and the checkpoint if one is given."""
    if flags["checkpoint_path"] is None:
        return _scene_without_checkpoint(flags, console)
    mode = options_of_mode(flags["regularization_type"] or "dn_consistency")
    options = from_args(mode, flags, output_dir=flags["output_dir"])
    notes: list[str] = []
    checkpoint, scene = load_views(options, notes.append, require_images=True)
    suggested_mode, findings = _scene_with_mode(scene, notes, starts_from_points=False)
    show(console, scene.description, findings)
    cloud_notes: list[str] = []
    cloud = checkpoint.read_cloud(cloud_notes.append, scene.offset)
    if len(cloud) == 0:
        raise UserError(f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again")
    cloud_findings = gaussian_findings(cloud, scene) + _note_findings(cloud_notes)
    if scene.extent > 0:
        cloud_findings.append(memory_finding(cloud, options, scene))
    show(console, str(checkpoint.ply_path), cloud_findings)
    if flags["minutes"] is not None:
        mode = flags["regularization_type"] or suggested_mode
        plan = plan_of(flags.replaced(regularization_type=mode, stop_after=None))
        with ImageStore(options.config.white_background) as images:
            TimePlan(plan, console).preview(plan, images)
    return findings + cloud_findings


def _scene_without_checkpoint(flags: FlagValues, console: Console) -> list[Finding]:
    """Check and print a scene that training would start from."""
    notes: list[str] = []
    scene = load_scene(
        flags["scene_path"],
        size_rule=from_args(SugarSize, flags),
        images_dir=flags["images"] or "images",
        eval_split=flags["eval"],
        masks=from_args(MaskOptions, flags),
        view_options=from_args(ViewOptions, flags),
        notify=notes.append,
    )
    _, findings = _scene_with_mode(scene, notes, starts_from_points=True)
    show(console, scene.description, findings)
    return findings


def _scene_with_mode(
    scene: Scene, notes: Sequence[str], starts_from_points: bool
) -> tuple[str, list[Finding]]:
    """Return the mode that suits a scene, and all findings about the scene."""
    mode, reason = mode_of(scene)
    findings = scene_findings(scene, starts_from_points) + _note_findings(notes)
    findings.append(Finding("mode", f"-r {mode} suits this capture: {reason}"))
    for what, where, advice in check_capture(scene)[0]:
        findings.append(Finding(what, where, "warning", advice))
    return mode, findings


def _note_findings(notes: Iterable[str]) -> list[Finding]:
    """Findings from the messages of a reader."""
    return [Finding("note", note, "warning") for note in notes]


def show(console: Console, title: str, findings: Iterable[Finding]) -> None:
    """Print findings as a table."""
    rows = []
    for finding in findings:
        rows.append((finding.what, f"{finding.state:<8} {finding.value}"))
        if finding.advice:
            rows.append(("", f"         -> {finding.advice}"))
    console.table(title, rows)


def machine_findings(
    kind: str, gpu: int | None, output: Path, facts: devices.CudaFacts | None = None
) -> list[Finding]:
    """Check the computer and the installed packages.

    Args:
        kind: ``auto``, ``cpu`` or ``cuda``, as ``--device``.
        gpu: Number of the GPU, as ``--gpu``.
        output: Folder of results; it need not exist.
        facts: What is known of GPUs and driver; if None, they are looked at.
    """
    facts = facts or devices.cuda_facts()
    findings = [*_system(output), *_torch(facts)]
    for index, device in enumerate(facts.gpus):
        available = format_bytes(available_bytes(torch.device("cuda", index)) or 0)
        memory = f"{available} of {format_bytes(device.memory)} free"
        value = f"{device.name}, compute capability {device.version}, {memory}"
        findings.append(Finding(f"GPU {index}", value))
    try:
        choice = devices.choose_device(kind, gpu, facts)
    except UserError as error:
        findings.append(Finding("device", "none", "problem", str(error)))
        findings += _libraries()
        return findings
    # A driver means that there is a GPU: not to use it is hardly what its owner wants.
    is_missed = choice.device.type == "cpu" and facts.driver and kind == "auto"
    advice = "the line above says how to fix it"
    findings.append(Finding.unless(is_missed, "device", choice.reason, "problem", advice))
    findings += _rasterizers(choice.device)
    findings += _libraries()
    return findings


def _system(output: Path) -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    free_memory = available_bytes("cpu")
    if free_memory is not None:
        value = format_bytes(free_memory)
        is_little = free_memory < LITTLE_MEMORY
        advice = "close other programs; photographs and meshing need some"
        yield Finding.unless(is_little, "free main memory", value, "warning", advice)
    folders = (output.resolve(), *output.resolve().parents)
    existing = next(folder for folder in folders if folder.is_dir())
    free_disk = shutil.disk_usage(existing).free
    value = f"{format_bytes(free_disk)} at {existing}"
    is_little = free_disk < LITTLE_DISK
    advice = "a million Gaussians take 0.7 GB in every checkpoint that is kept"
    yield Finding.unless(is_little, "free disk space", value, "warning", advice)


def _torch(facts: devices.CudaFacts) -> Iterator[Finding]:
    build = f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU-only build"
    oldest, newest = TESTED_TORCH
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    is_untested = not oldest <= version <= newest
    value = f"{torch.__version__}, {build}"
    advice = (
        f"tested with {_version_text(oldest)} to {_version_text(newest)}; it may work all the same"
    )
    yield Finding.unless(is_untested, "torch", value, "warning", advice)
    yield Finding("Warp", f"{wp.__version__}, kernels kept in {wp.config.kernel_cache_dir}")
    if not facts.driver:
        yield Finding("NVIDIA driver", "none")
        return
    supported_cuda = devices.driver_cuda_version()
    if supported_cuda is None:
        yield Finding("NVIDIA driver", "found")
        return
    needed_cuda = (12, 0) if WARP_VERSION < (1, 18) else devices.MIN_DRIVER_CUDA
    value = f"found, supports CUDA up to {_version_text(supported_cuda)}"
    is_old = supported_cuda < needed_cuda
    advice = (
        f"the kernels need CUDA {devices.MIN_DRIVER_CUDA[0]}, so driver {devices.MIN_DRIVER} or "
        f"newer; {devices.INSTALL_DRIVER}; {devices.KEEP_DRIVER}"
    )
    yield Finding.unless(is_old, "NVIDIA driver", value, "problem", advice)


def _version_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _rasterizers(device: torch.device) -> Iterator[Finding]:
    fault = reference_test(device)
    outcome = fault or "agrees with the float64 reference"
    value = f"built in, {device.type}: {outcome}"
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


def scene_findings(scene: Scene, starts_from_points: bool = False) -> list[Finding]:
    """Check cameras, photographs, masks and points of a scene.

    Args:
        scene: The scene.
        starts_from_points: Whether there is no checkpoint, so that training needs points.
    """
    return [
        *_cameras(scene),
        *_photographs(scene),
        *_masks(scene),
        *_points(scene.points, starts_from_points),
    ]


def _cameras(scene: Scene) -> Iterator[Finding]:
    n_train = len(scene.train_cameras)
    value = f"{n_train} to train on, {len(scene.test_cameras)} held out"
    advice = f"fewer than {FEW_VIEWS} views seldom determine a surface; take more"
    yield Finding.unless(n_train < FEW_VIEWS, "cameras", value, "warning", advice)
    value = f"{scene.extent:.3g} world units"
    advice = "all cameras stand in one place; take photographs from different positions"
    yield Finding.unless(scene.extent <= 0, "camera extent", value, "problem", advice)


def _photographs(scene: Scene) -> Iterator[Finding]:
    cameras = scene.cameras
    sizes = Counter(camera.size for camera in cameras)
    common_sizes = [f"{n} of {w} x {h}" for (w, h), n in sizes.most_common(3)]
    more = f" and {len(sizes) - 3} other sizes" if len(sizes) > 3 else ""
    n_bytes = 0
    for camera in cameras:
        n_channels = 3 if camera.mask is None else 4
        n_bytes += n_channels * camera.n_pixels
    value = f"{', '.join(common_sizes)}{more}; {format_bytes(n_bytes)} as bytes"
    yield Finding("training size", value)
    broken = [camera.name for camera in cameras if not _opens(camera)]
    value = f"{len(broken)} of {len(cameras)} cannot be opened" if broken else "all can be opened"
    advice = f"copy them again: {', '.join(broken[:5])}"
    yield Finding.unless(bool(broken), "photographs", value, "problem", advice)


def _opens(camera: Camera) -> bool:
    """Whether the file of a photograph begins as an image does; nothing is decoded."""
    try:
        return camera.image_path is not None and image_size(camera.image_path)[0] > 0
    except UserError:
        return False


def _masks(scene: Scene) -> Iterator[Finding]:
    """Check the masks of training views; nothing where there are none."""
    cameras = scene.train_cameras
    masks = [camera.mask for camera in cameras if camera.mask is not None]
    if not masks:
        return
    shares = [overview(camera).mean() / 255 for camera in cameras if camera.mask is not None]
    counts = f"{len(masks)} of {len(cameras)}"
    value = f"{counts}, mode {masks[0].mode}; {np.mean(shares):.0%} of their pixels count"
    advice = "photographs without a mask count whole; make the others, or --masks none"
    yield Finding.unless(len(masks) < len(cameras), "masks", value, "warning", advice)
    hull = hull_of(cameras)
    if hull is not None and len(scene.points):
        n_inside = int(hull.contains(torch.from_numpy(scene.points)).sum())
        what = "points inside of the masks"
        value = f"{n_inside:,} of {len(scene.points):,}"
        advice = "do the masks belong to these photographs? Else --mask_mode ignore or --masks none"
        yield Finding.unless(n_inside == 0, what, value, "problem", advice)


def _points(points: np.ndarray, starts_from_points: bool) -> Iterator[Finding]:
    """Check the number of points, (N, 3), and their distances."""
    n_points = len(points)
    state: State = "problem" if starts_from_points and n_points == 0 else "warning"
    advice = (
        "vanilla training starts from them; let COLMAP triangulate again, or pass a point cloud "
        "with --init_ply"
    )
    is_few = n_points < FEW_POINTS
    what = "points of the reconstruction"
    yield Finding.unless(is_few, what, f"{n_points:,}", state, advice)
    if n_points > 1:
        distances = nearest_neighbors(torch.from_numpy(points), 2).sq_distances[:, 1].sqrt()
        value = f"{_percentiles(distances)} world units {PERCENTILES_TEXT}"
        yield Finding("distance of neighbouring points", value)


def _percentiles(values: Tensor) -> str:
    percentiles = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return ", ".join(f"{value:.3g}" for value in percentiles)


def memory_finding(cloud: GaussianCloud, options: CoarseOptions, scene: Scene) -> Finding:
    """Predict the memory of coarse training, and the plan that it fits with."""
    what = "memory of coarse training"
    try:
        plan = predict_coarse(cloud, options.config, options.memory, scene)
    except UserError as error:
        return Finding(what, "does not fit", "problem", str(error))
    if plan is None:
        return Finding(what, "the system does not say what is free")
    return Finding(what, f"{format_bytes(plan.peak)} at most; {plan.lines()[0]}")


def gaussian_findings(cloud: GaussianCloud, scene: Scene) -> list[Finding]:
    """Check size, shape, opacity, duplicates and visibility of Gaussians."""
    return [
        Finding("Gaussians", f"{len(cloud):,}"),
        *_sizes(cloud, scene.extent),
        _opacity(cloud),
        _duplicates(cloud),
        _visibility(cloud, scene),
    ]


def _opacity(cloud: GaussianCloud) -> Finding:
    share = float((cloud.opacity_logits < 0).float().mean())
    value = f"{share:.1%} now; what stays so until iteration 9000 is removed"
    advice = "nearly everything is transparent; train the vanilla stage for longer"
    return Finding.unless(share > 1 - MANY, "opacity below 0.5", value, "warning", advice)


def _duplicates(cloud: GaussianCloud) -> Finding:
    n_positions = torch.unique(cloud.means, dim=0).shape[0]
    share = 1.0 - n_positions / len(cloud)
    value = f"{share:.2%} share their position with another"
    advice = "the file may hold the scene twice"
    return Finding.unless(share > MANY, "duplicates", value, "warning", advice)


def _visibility(cloud: GaussianCloud, scene: Scene) -> Finding:
    counts = []
    with torch.no_grad():
        gaussians = cloud.activate()
        for view in surveyed(scene.train_cameras):
            n_visible = int((project(gaussians, view).radii > 0).sum())
            counts.append(n_visible)
    value = f"{min(counts):,} to {max(counts):,} Gaussians in {len(counts)} of the views"
    state: State = "warning" if max(counts) else "problem"
    advice = (
        "Gaussians and cameras live in different worlds: was the checkpoint trained on this scene?"
    )
    return Finding.unless(min(counts) == 0, "visible", value, state, advice)


def _sizes(cloud: GaussianCloud, extent: float) -> Iterator[Finding]:
    scales = cloud.log_scales.exp()
    longest = scales.amax(dim=1)
    longest_text = _percentiles(longest.cpu())
    shortest_text = _percentiles(scales.amin(dim=1).cpu())
    value = f"{longest_text} world units {PERCENTILES_TEXT}, shortest {shortest_text}"
    yield Finding("longest axes", value)
    is_finite = torch.ones(len(cloud), dtype=torch.bool, device=scales.device)
    for tensor in cloud.tensors().values():
        is_finite &= tensor.flatten(1).isfinite().all(dim=1)
    n_bad = int((~is_finite).sum())
    advice = "the checkpoint is damaged or its training diverged; train it again"
    yield Finding.unless(n_bad > 0, "not finite", f"{n_bad:,} Gaussians", "problem", advice)
    large_share = float((longest > LARGE_SHARE_OF_EXTENT * extent).float().mean())
    small_share = float((longest < SMALL_SHARE_OF_EXTENT * extent).float().mean())
    large_text = f"{large_share:.2%} longer than {LARGE_SHARE_OF_EXTENT:g} extents"
    small_text = f"{small_share:.2%} shorter than {SMALL_SHARE_OF_EXTENT:g}"
    is_degenerate = max(large_share, small_share) > MANY
    value = f"{large_text}, {small_text}"
    advice = "scene and checkpoint may differ in scale, or its training diverged"
    yield Finding.unless(is_degenerate, "degenerate", value, "warning", advice)
