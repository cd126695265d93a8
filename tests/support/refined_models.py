# SPDX-License-Identifier: Apache-2.0
"""Refined models as the refinement leaves them, without a refinement."""

from __future__ import annotations

from pathlib import Path

import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.engine.checkpoint import save_payload
from gaussian_splatting.engine.model import STATE_NAMES as FREE_NAMES
from sugar_scene.bound_model import FACES, STATE_NAMES, THICKNESS
from sugar_scene.mesh_bound import BACKGROUND, bind_to_mesh
from tests.support.mesh_scenes import icosahedron

NAME = "sugarfine_3Dgs7000_level03_decim20_normalconsistency01_gaussperface3"


def refined_state(opacity: float = 6.0, per_triangle: int = 3) -> dict:
    """An icosahedron coloured by position; its last five faces are faint."""
    mesh = icosahedron()
    vertices, faces = torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.faces)
    cloud = bind_to_mesh(vertices, faces, 0.5 + 0.4 * vertices, per_triangle, 2.0)
    cloud.opacity_logits[:] = opacity
    cloud.log_scales += 0.8
    return {
        FACES: cloud.faces.int(),
        THICKNESS: cloud.thickness,
        **{file: getattr(cloud, own) for own, file in STATE_NAMES.items()},
    }


def save_model(
    root: Path, state: dict, name: str = NAME, background: GaussianCloud | None = None
) -> Path:
    """Write a checkpoint of a state, and of free Gaussians, under its traditional name."""
    path = root / name / "15000.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = {"iteration": 15_000, "epoch": 1, "train_losses": [], "optimizer_state_dict": {}}
    payload = {"state_dict": state, **rest}
    if background is not None:
        free_state = {file: getattr(background, field) for field, file in FREE_NAMES.items()}
        payload[BACKGROUND] = {"state_dict": free_state, "optimizer_state_dict": {}}
    save_payload(path, payload)
    return path
