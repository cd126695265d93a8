# SPDX-License-Identifier: Apache-2.0
"""Depth maps of all photographs of a scene, estimated where they are not there yet.

They lie beside the photographs, where the next run and a person find them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera, reduced_size
from gaussian_splatting.data.maps.estimators.depth_anything import DEPTH_ANYTHING
from gaussian_splatting.data.maps.estimators.estimator import Estimate, Estimator, Photograph
from gaussian_splatting.data.maps.estimators.metric3d import METRIC3D
from gaussian_splatting.data.maps.estimators.moge import MOGE
from sugar_utils.device import choose_device
from sugar_utils.errors import Notify, explained
from sugar_utils.files import atomic_path, check_writable
from sugar_utils.memory import release_cached

ESTIMATORS = {"moge": MOGE, "da3": DEPTH_ANYTHING, "metric3d": METRIC3D}
MAX_SIDE = 1024  # of a photograph that is looked at

# Whatever a program of others, its download or its GPU may raise.
_LOADING_ERRORS = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
)


def estimated_folder(root: Path, name: str) -> Path:
    """Return the folder of the maps of an estimator."""
    return root / f"depths_{name}"


def estimate_depths(cameras: Sequence[Camera], root: Path, name: str, notify: Notify) -> Path:
    """Estimate the depth maps that are missing, and return their folder.

    Raises:
        UserError: The program is missing, does not load, fails, or the folder cannot be written.
    """
    estimator = ESTIMATORS[name]
    folder = estimated_folder(root, name)
    paths = {camera.name: folder / f"{camera.name}.npy" for camera in cameras}
    missing = [camera for camera in cameras if _is_missing(camera, paths[camera.name])]
    if not missing:
        return folder
    require_estimator(name)
    check_writable(folder)
    device = choose_device("auto", None).device
    estimate = _load(estimator, name, device)
    notify(
        f"depth maps of {len(missing)} photographs by {estimator.label}, weights "
        f"{estimator.weights} ({estimator.licence}), to {folder}"
    )
    for camera in missing:
        values = _estimate(estimate, estimator, camera)
        with atomic_path(paths[camera.name]) as temporary, temporary.open("wb") as file:
            np.save(file, values)
    del estimate
    release_cached(device)
    return folder


def _is_missing(camera: Camera, path: Path) -> bool:
    return camera.image_path is not None and not path.exists()


def require_estimator(name: str) -> None:
    """Refuse an estimator that is not installed.

    Raises:
        UserError: It is not.
    """
    estimator = ESTIMATORS[name]
    advice = f"install {estimator.install}, or pass --depths DIR with maps made elsewhere"
    with explained(f"--depths {name} needs the program {estimator.label}", advice, ImportError):
        for package in estimator.packages:
            importlib.import_module(package)


def _load(estimator: Estimator, name: str, device: torch.device) -> Estimate:
    with explained(
        f"--depths {name}: cannot load {estimator.weights}:",
        "see that it can be downloaded, or pass --depths DIR with maps made elsewhere",
        *_LOADING_ERRORS,
    ):
        return estimator.load(device)


def _estimate(estimate: Estimate, estimator: Estimator, camera: Camera) -> np.ndarray:
    """Estimate the depth of a photograph as it was taken. (h, w) float32"""
    width, height = reduced_size(*camera.size, MAX_SIDE)
    path = camera.source_path or camera.image_file
    pixels = images.decode_image(path, width, height)
    focal = camera.fx * width / camera.width
    with explained(
        f"{estimator.label} failed at {camera.name}:",
        "leave that photograph out, or pass --depths none",
        *_LOADING_ERRORS,
    ):
        values = np.asarray(estimate(Photograph(pixels, focal)), dtype=np.float32)
        if values.ndim != 2:
            raise ValueError(f"it returned an array of shape {values.shape}")
    return values
