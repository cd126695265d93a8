# SPDX-License-Identifier: Apache-2.0
"""Cameras by the names that other programs give them, which may lack extension, dots or folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import IMAGE_SUFFIXES


class CamerasByName:
    """Finds the camera of a stored name.

    Args:
        train: Cameras that are found by abridged names, too.
        test: Cameras that are found by their exact names. NeRF-synthetic training and test images
            share their names; stored ones mean training.
    """

    def __init__(self, train: Sequence[Camera], test: Sequence[Camera]) -> None:
        self._exact = {camera.name: camera for camera in (*train, *test)}
        self._loose: dict[str, list[Camera]] = {}
        for camera in train:
            pure = PurePosixPath(camera.name)
            keys = {_stem(camera.name), _stem(pure.name), pure.name.split(".")[0]}
            for key in {key.lower() for key in keys}:
                self._loose.setdefault(key, []).append(camera)

    def __call__(self, name: str) -> Camera | None:
        """The camera; None if there is none or the choice is unclear."""
        if name in self._exact:
            return self._exact[name]
        for key in (name.lower(), _stem(name).lower()):
            found = self._loose.get(key, [])
            if len(found) == 1:
                return found[0]
        return None


def _stem(name: str) -> str:
    """The name without a known image extension."""
    pure = PurePosixPath(name)
    return pure.with_suffix("").as_posix() if pure.suffix.lower() in IMAGE_SUFFIXES else name
