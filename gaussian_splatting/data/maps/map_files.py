# SPDX-License-Identifier: Apache-2.0
"""Files of depth and normal maps: lookup, reading, reduction, undistortion."""

from __future__ import annotations

import tokenize
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.names import ImageFolder, ImagePlaces
from sugar_utils.errors import UserError, explained
from sugar_utils.files import require_regular_file, without_none
from sugar_utils.libraries import load_package

NONE = "none"  # in place of a folder
FILES = (".png", ".tif", ".tiff", ".npy", ".exr")
MAX_SIDE = 512  # of a map that is kept


def find_folder(root: Path, named: str | None, usual: str, flag: str) -> Path | None:
    """Return a folder of maps; None if none is named and the scene has none.

    Args:
        named: Value of the flag, in the scene folder or by itself; None: not given.
        usual: Name of the folder where the flag is not given.
    """
    if named is None:
        folder = root / usual
        return folder if folder.is_dir() else None
    for folder in (root / named, Path(named)):
        if folder.is_dir():
            return folder
    raise UserError(f"{flag} {named}: no such folder, in {root} or by itself")


def find_maps(cameras: Sequence[Camera], folder: Path) -> dict[str, Path]:
    """Return the map of each view that has one."""
    names = [camera.name for camera in cameras]
    paths = ImagePlaces(ImageFolder(folder, suffixes=FILES)).find_all(names)
    return without_none(paths)


def read_numbers(path: Path, kind: str, advice: str) -> np.ndarray:
    """Read the numbers of a file, in its type and shape.

    Args:
        kind: What the file is, for messages.
    """
    # A header may promise more numbers than any memory holds.
    other_kinds = (MemoryError, tokenize.TokenError, zipfile.BadZipFile, StopIteration)
    kinds = (*images.IMAGE_ERRORS, *other_kinds)
    with explained(f"cannot read the {kind} {path}:", advice, *kinds):
        suffix = path.suffix.lower()
        if suffix == ".npy":
            values = np.load(require_regular_file(path), allow_pickle=False)
            if not isinstance(values, np.ndarray):
                raise ValueError("it is a ZIP file of arrays, not one array")
        elif suffix == ".exr":
            (exr,) = load_package(f"reading {path}", "OpenEXR", "OpenEXR")
            channels = exr.File(str(path)).channels()
            values = next(iter(channels.values())).pixels
        else:
            with images.open_image(path) as image:
                values = np.asarray(image)
        return np.squeeze(values)


def reduced(values: np.ndarray) -> np.ndarray:
    """Return every second, third, ... row and column of a large map. (h, w, ...)"""
    step = -(-max(values.shape[:2]) // MAX_SIDE)
    return values[step // 2 :: step, step // 2 :: step]


def undistorted(values: np.ndarray, camera: Camera) -> np.ndarray:
    """Return the nearest value of a distorted map at the pixels of the undistorted view.

    (h, w, ...), zeros outside
    """
    height, width = values.shape[:2]
    view = camera.resized(width, height)
    rays = pixel_rays(view, dtype=torch.float64, device="cpu").reshape(-1, 3).numpy()
    lens = images.lens_of(camera.lens, width, height)
    pixels = np.asarray(lens.img_from_cam(rays, check_cheirality=False))
    x, y = np.floor(pixels).T
    inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    rows = np.where(inside, y, 0).astype(int)
    columns = np.where(inside, x, 0).astype(int)
    nearest = values[rows, columns]
    nearest[~inside] = 0
    return nearest.reshape(values.shape)


def nearest_values(values: Tensor, camera: Camera) -> Tensor:
    """Return the nearest value of a map at each pixel of a view. (h, w, ...) -> (H, W, ...)"""
    height, width = values.shape[:2]
    rows = torch.arange(camera.height, device="cpu") * height // camera.height
    columns = torch.arange(camera.width, device="cpu") * width // camera.width
    return values[rows[:, None], columns]
