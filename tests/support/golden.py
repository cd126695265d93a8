# SPDX-License-Identifier: Apache-2.0
"""Recorded inputs and outputs of the original method, and how tests read them."""

from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera

GOLDEN_DIR = Path(__file__).resolve().parents[1] / "data" / "golden"


def load_golden(case: str) -> dict[str, np.ndarray]:
    """All arrays of one recorded case, by name (see data/golden/README.md)."""
    with np.load(GOLDEN_DIR / f"{case}.npz") as archive:
        return {name: archive[name] for name in archive.files}


def golden_cloud(case: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> GaussianCloud:
    """The raw parameters of a case as leaf tensors; missing colours become zeros."""
    n = case["in_points"].shape[0]

    def leaf(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        value = case.get(f"in_{name}", np.zeros(shape, np.float32))
        return torch.tensor(value, dtype=dtype).requires_grad_(True)

    return GaussianCloud(
        means=leaf("points", (n, 3)),
        sh_dc=leaf("sh_coordinates_dc", (n, 1, 3)),
        sh_rest=leaf("sh_coordinates_rest", (n, 15, 3)),
        opacity_logits=leaf("all_densities", (n, 1)),
        log_scales=leaf("scales", (n, 3)),
        quats=leaf("quaternions", (n, 4)),
    )


def golden_cameras(case: dict[str, np.ndarray]) -> list[Camera]:
    """The four scene cameras of a case; principal point at the image centre."""
    width, height = int(case["in_cam_width"]), int(case["in_cam_height"])
    cameras = []
    for i, (c2w, center) in enumerate(
        zip(case["in_cam_c2w_R"], case["in_cam_position"], strict=True)
    ):
        rotation = np.linalg.inv(c2w)
        cameras.append(
            Camera(
                name=f"view_{i:03d}",
                width=width,
                height=height,
                fx=float(case["in_cam_fx"]),
                fy=float(case["in_cam_fy"]),
                cx=width / 2,
                cy=height / 2,
                rotation=rotation,
                translation=-rotation @ center,
            )
        )
    return cameras
