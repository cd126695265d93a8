# SPDX-License-Identifier: Apache-2.0
"""What decides a result: the settings, and the content of all that is read.

Paths are no part of it. A scene or a checkpoint that was moved is the same; one that was trained
again or edited in its old place is not.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.data.scene import Scene
from sugar_utils.files import file_digest, json_values

_NAMED = 3
_DIGITS = 8
"""Decimals that count in a camera: enough for any pose, and no other processor's rounding."""


@dataclass(frozen=True)
class Identity:
    """What decides a result; all values as JSON keeps them."""

    settings: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("settings", "inputs", "sources"):
            object.__setattr__(self, name, json_values(getattr(self, name)))

    def record(self) -> dict[str, Any]:
        """What files keep of it."""
        return {"settings": self.settings, "inputs": self.inputs, "sources": self.sources}

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """One line for every setting and kind of input that is not as recorded.

        Args:
            recorded: What a file kept of another identity; anything that is missing differs.
        """
        settings, inputs = (_mapping(recorded.get(name)) for name in ("settings", "inputs"))
        return [
            *settings_differences(settings, self.settings),
            *input_differences(inputs, self.inputs),
        ]


def settings_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lines such as ``"random_seed: 0 → 1"`` for every setting that is not the same.

    Nested dictionaries are compared by dotted name; a tuple equals the list that a file keeps of
    it.

    Returns:
        The differences in the order of ``current``, then those only in ``saved``.
    """
    new = _flatten(json_values(current))
    old = _flatten(json_values(saved))
    names = [*new, *(name for name in old if name not in new)]
    absent = "(not set)"
    return [
        f"{name}: {old.get(name, absent)} → {new.get(name, absent)}"
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def input_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lines such as ``"photographs: a.jpg changed"`` for kinds of input that are not the same."""
    lines = []
    for kind in [*current, *(kind for kind in saved if kind not in current)]:
        old, new = saved.get(kind), current.get(kind)
        if old == new:
            continue
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            lines.append(f"{kind}: {'not recorded' if old is None else 'changed'}")
            continue
        changed = [name for name in new if name in old and new[name] != old[name]]
        parts = [
            _named(changed, "changed"),
            _named([name for name in new if name not in old], "added"),
            _named([name for name in old if name not in new], "gone"),
        ]
        lines.append(f"{kind}: {', '.join(part for part in parts if part)}")
    return lines


def _named(names: Sequence[str], what: str) -> str:
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} {what}" if names else ""


def scene_inputs(
    scene: Scene, *, photographs: bool = True, tracks: bool = False
) -> dict[str, dict[str, str] | str]:
    """Digests of a scene's cameras, which of them are held out, their photographs and masks.

    Args:
        photographs: Whether the photographs are read; otherwise only the cameras count.
    """
    roles = (("train", scene.train_cameras), ("test", scene.test_cameras))
    views = [(role, camera) for role, cameras in roles for camera in cameras]
    inputs = {"cameras": {camera.name: _camera_digest(camera, role) for role, camera in views}}
    if photographs:
        files = {c.name: c.source_path or c.image_path for _, c in views if c.image_path}
        digests = file_digests(files.values())
        inputs["photographs"] = dict(zip(files, digests, strict=True))
    masked = {camera.name: camera.mask for _, camera in views if camera.mask is not None}
    if masked:
        digests = file_digests(mask.path for mask in masked.values())
        modes = [f"{mask.mode}{' alpha' * mask.alpha}" for mask in masked.values()]
        shown = [f"{mode} {digest}" for mode, digest in zip(modes, digests, strict=True)]
        inputs["masks"] = dict(zip(masked, shown, strict=True))
    if tracks and scene.observations is not None:
        inputs["point tracks"] = _tracks_digest(scene.observations)
    return inputs


def _tracks_digest(observations: Observations) -> str:
    digest = hashlib.sha256(observations.points.tobytes() + observations.lengths.tobytes())
    for name, rows in sorted(observations.rows.items()):
        digest.update(f"{name} {len(rows)} ".encode("utf-8", "surrogatepass") + rows.tobytes())
    return digest.hexdigest()[:16]


def points_digest(scene: Scene) -> str:
    """Digest of the points that a scene starts from."""
    return hashlib.sha256(scene.points.tobytes() + scene.points_rgb.tobytes()).hexdigest()[:16]


def file_digests(paths: Iterable[Path]) -> list[str]:
    """Digests of the contents of files, several read at a time."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(file_digest, paths))


def _camera_digest(camera: Camera, role: str) -> str:
    """Short text that changes with anything that a render of the camera depends on."""
    offset = camera.translation
    # A power of two scales without rounding; half of the next one is never out of range.
    unit = math.ldexp(0.5, math.frexp(float(np.abs(offset).max()))[1])
    lens = (camera.fx, camera.fy, camera.cx, camera.cy)
    numbers = [
        *(value / camera.width for value in lens),
        *camera.rotation.flatten(),
        unit,
        *(offset / unit),
    ]
    # Adding zero turns a negative zero into a positive one.
    rounded = [round(float(value), _DIGITS) + 0.0 for value in numbers]
    text = f"{role} {camera.width} {camera.height} {rounded} {camera.lens}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
