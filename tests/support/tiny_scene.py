# SPDX-License-Identifier: Apache-2.0
"""A scene so small that whole training runs take seconds: known Gaussians, ten 64 x 48 views.

The photographs are renders of the Gaussians, so a trainer that works gets close to them.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
import torch
from PIL import Image

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.ply import write_gaussian_ply, write_point_ply
from gaussian_splatting.rasterization import rasterize
from gaussian_splatting.scenes.reference_layout import (
    point_cloud_path,
    write_cameras_json,
    write_cfg_args,
)
from sugar_utils.entrypoint import run_main
from tests.support.command_line import as_flags
from tests.support.random_scenes import look_at
from tests.support.warm_processes import WarmProcess

REPOSITORY = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 64, 48
PRINCIPAL = (3.0, -2.0)
"""Offset of the principal point from the image centre, in pixels."""

N_FAINT = 40
SHORT_PIPELINE = as_flags(
    r="dn_consistency",
    schedule_scale=0.002,
    sdf_samples=300,
    v=300,
    f=3000,
    surface_points=4000,
    poisson_depth=4,
    meshing_backend="pycolmap",
    background_mesh=False,
    square_size=6,
    force=True,
)
"""All stages in seconds."""


@dataclass(frozen=True)
class TinyScene:
    """Paths of a scene that was written.

    Attributes:
        root: Scene folder.
        cameras: All views, in the order of their names.
        cloud: The Gaussians that the photographs show.
        points: Points of the reconstruction. (P, 3)
        points_rgb: Their colours. (P, 3) uint8
    """

    root: Path
    cameras: list[Camera]
    cloud: GaussianCloud
    points: np.ndarray
    points_rgb: np.ndarray


def tiny_cloud(n: int = 200, seed: int = 0) -> GaussianCloud:
    """Flat opaque Gaussians on a unit sphere with a smooth texture."""
    rng = np.random.default_rng(seed)
    normals = rng.normal(size=(n, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    colors = 0.5 + 0.4 * np.sin(3.0 * normals + np.array([0.0, 1.0, 2.0]))
    # The rotation that takes the x axis, the thin one, to the normal.
    quats = np.concatenate(
        [1 + normals[:, :1], np.zeros((n, 1)), -normals[:, 2:], normals[:, 1:2]], axis=1
    )
    scales = np.broadcast_to(np.array([0.03, 0.14, 0.14]), (n, 3))
    opacities = rng.uniform(0.85, 0.97, (n, 1))

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(values), dtype=torch.float32)

    return GaussianCloud(
        means=tensor(normals),
        sh_dc=tensor((colors - 0.5) / SH_C0)[:, None, :],
        sh_rest=torch.zeros(n, 15, 3),
        opacity_logits=tensor(np.log(opacities / (1 - opacities))),
        log_scales=tensor(np.log(scales)),
        quats=tensor(quats),
    )


def tiny_cameras(n: int = 10, zoom: int = 1) -> list[Camera]:
    """Views from a ring around the sphere, at two heights; ``zoom`` times as many pixels a side."""
    cameras = []
    for i in range(n):
        angle = 2 * math.pi * i / n
        center = (3 * math.cos(angle), 3 * math.sin(angle), 0.8 if i % 2 else -0.5)
        cameras.append(
            look_at(
                center,
                width=WIDTH * zoom,
                height=HEIGHT * zoom,
                focal=60.0 * zoom,
                principal=(PRINCIPAL[0] * zoom, PRINCIPAL[1] * zoom),
                name=f"view_{i:02d}.png",
            )
        )
    return cameras


def make_tiny_scene(root: Path, n_views: int = 10, n_points: int = 300, zoom: int = 1) -> TinyScene:
    """Write photographs and a binary COLMAP model with ``n_points`` points under ``root``."""
    return write_scene(root, tiny_cloud(), tiny_cameras(n_views, zoom), n_points)


def write_scene(
    root: Path, cloud: GaussianCloud, cameras: list[Camera], n_points: int
) -> TinyScene:
    """The same of any Gaussians and cameras."""
    (root / "images").mkdir(parents=True)
    placed = []
    for camera in cameras:
        path = root / "images" / camera.name
        save_png(path, render_8_bit(cloud, camera))
        placed.append(replace(camera, image_path=path))
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(cloud), n_points)
    points = cloud.means.numpy()[chosen] + rng.normal(size=(n_points, 3)) * 0.03
    colors = (cloud.sh_dc[:, 0].numpy()[chosen] * SH_C0 + 0.5).clip(0, 1) * 255
    points_rgb = colors.astype(np.uint8)
    write_model(root / "sparse" / "0", cameras, points, points_rgb)
    return TinyScene(root, placed, cloud, points, points_rgb)


def write_model(
    folder: Path, cameras: list[Camera], points: np.ndarray, points_rgb: np.ndarray
) -> None:
    """Write a binary COLMAP model, one camera per image."""
    model = pycolmap.Reconstruction()
    for number, view in enumerate(cameras, start=1):
        camera = pycolmap.Camera(
            model="PINHOLE",
            width=view.width,
            height=view.height,
            params=[view.fx, view.fy, view.cx, view.cy],
        )
        camera.camera_id = number
        model.add_camera_with_trivial_rig(camera)
        image = pycolmap.Image(name=view.name, camera_id=number, image_id=number)
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(view.rotation), view.translation)
        model.add_image_with_trivial_frame(image, pose)
    for point, color in zip(points, points_rgb, strict=True):
        model.add_point3D(point, pycolmap.Track(), color)
    folder.mkdir(parents=True, exist_ok=True)
    model.write_binary(str(folder))


def make_tiny_checkpoint(root: Path, scene: TinyScene, iteration: int = 7000) -> Path:
    """Write a vanilla checkpoint folder: the scene's Gaussians disturbed, plus some faint ones."""
    write_cfg_args(root, source_path=scene.root, eval_split=True)
    write_cameras_json(root, scene.cameras, [])
    write_point_ply(root / "input.ply", scene.points, scene.points_rgb)
    write_gaussian_ply(point_cloud_path(root, iteration), disturbed_cloud(scene.cloud))
    return root


def disturbed_cloud(cloud: GaussianCloud) -> GaussianCloud:
    """The Gaussians a little off, the last ``N_FAINT`` of them with an opacity below 0.5."""
    rng = torch.Generator().manual_seed(2)
    n = len(cloud)
    logits = cloud.opacity_logits.clone()
    logits[n - N_FAINT :] = -1.0
    return GaussianCloud(
        means=cloud.means + 0.02 * torch.randn(n, 3, generator=rng),
        sh_dc=cloud.sh_dc + 0.1 * torch.randn(n, 1, 3, generator=rng),
        sh_rest=0.02 * torch.randn(n, 15, 3, generator=rng),
        opacity_logits=logits,
        log_scales=cloud.log_scales + 0.1 * torch.randn(n, 3, generator=rng),
        quats=cloud.quats,
    )


def render_8_bit(cloud: GaussianCloud, camera: Camera) -> np.ndarray:
    """Quantise a render on black as saving it as PNG does. (H, W, 3) uint8"""
    with torch.no_grad():
        image = rasterize(cloud.activate(), camera, torch.zeros(3)).image
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Write an 8-bit image."""
    Image.fromarray(pixels).save(path, compress_level=1)


def psnr_of_files(a: Path, b: Path) -> float:
    """PSNR of two saved images in dB, in plain numpy."""
    x, y = (np.asarray(Image.open(path), dtype=np.float64) / 255 for path in (a, b))
    return float(-10 * np.log10(((x - y) ** 2).mean()))


def load_pt(path: Path) -> dict:
    """A checkpoint the way any other program would read it."""
    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same_bits(a: Path, b: Path) -> None:
    """Parameters, moments and step counts of two checkpoints are equal to the last bit."""
    first, second = load_pt(a), load_pt(b)
    for name, value in first["state_dict"].items():
        assert torch.equal(value, second["state_dict"][name]), name
    one, two = first["optimizer_state_dict"], second["optimizer_state_dict"]
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for index, moments in one["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, two["state"][index][name]), (index, name)
    kept, again = (payload.get("resume", {}).get("stage", {}) for payload in (first, second))
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        assert torch.equal(value, again[name]), name
    assert first["iteration"] == second["iteration"]
    assert first["epoch"] == second["epoch"]
    assert first["train_losses"] == second["train_losses"]


def events(run: Path):
    """All curves and pictures of a run's TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


def start(script: str, *flags: object, cwd: Path = REPOSITORY) -> WarmProcess:
    """Start an entry point as a process of its own."""
    return WarmProcess(script, [str(flag) for flag in flags], cwd=cwd, env={"OMP_NUM_THREADS": "1"})


def finish(process: WarmProcess | subprocess.Popen, timeout: float = 120) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for_checkpoint(
    process: WarmProcess, folder: Path, n_before: int, *, limit: float, linger: float
) -> None:
    """Wait for a checkpoint beyond iteration ``n_before`` or ``limit`` s, then for ``linger`` s."""
    end = time.monotonic() + limit
    while process.poll() is None and newest(folder) <= n_before and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(linger)


def newest(folder: Path) -> int:
    """Iteration of the newest checkpoint, -1 without any."""
    stems = (path.stem for path in folder.glob("*.pt"))
    return max((int(stem) for stem in stems if stem.isdecimal()), default=-1)


def kill(process: WarmProcess) -> None:
    """End a process the way a power cut does."""
    process.kill() if os.name == "nt" else process.send_signal(signal.SIGKILL)
    process.communicate()


def run_cli(main: Callable[[], int | None], /, *words: object, **settings: object) -> int:
    """Run an entry point in this process, as its script would, and return the exit code.

    Settings are flags, see :func:`as_flags`. Further words of the command line follow them.
    """
    before = sys.argv
    sys.argv = ["train.py", *map(str, [*as_flags(**settings), *words])]
    try:
        return run_main(main)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    finally:
        sys.argv = before


def refusal(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[], int | None],
    /,
    *words: object,
    **settings: object,
) -> str:
    """Run an entry point that refuses its input with exit code 2; return its one line of error."""
    code = run_cli(main, *words, **settings)
    error = capsys.readouterr().err
    assert_refused(code, error)
    return error


def assert_refused(code: int, error: str, *texts: str) -> None:
    """Check that a program refused its input in one line, in which there are some texts."""
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("error: "), error
    for text in texts:
        assert text in error
