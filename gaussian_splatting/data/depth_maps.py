# SPDX-License-Identifier: Apache-2.0
"""Depth maps that a capture has beside its photographs, brought into the units of the scene.

| who | where |
|---|---|
| scanning apps, 3DGS data, monocular estimators | ``depths/STEM.*`` or ``depths/NAME.EXT.*`` |
| nerfstudio | ``depth_file_path`` of each frame in ``transforms.json`` |
| Polycam and others | ``confidence/STEM.*`` beside the folder: 0 to 2, or 0 to 255 |

Files are 16-bit PNG, TIFF, NPY or EXR of any size with the aspect ratio of the photograph. What is
0 or not finite is unknown. Where no points tell the scale, whole numbers are millimetres and floats
are metres, whatever the file format. Values are depths z up to one scale for all (of a sensor), or
up to a scale and a shift for each image, of the depth or of its reciprocal (of an estimator): what
fits the points that the photographs observe best is taken. A map that does not fit them is left
out.
"""

from __future__ import annotations

import tokenize
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.names import ImageFolder, ImagePlaces
from gaussian_splatting.data.observations import Observations, median
from sugar_utils.errors import Notify, UserError, explained, shortened
from sugar_utils.files import in_parallel, require_regular_file
from sugar_utils.flags import AUTO, non_negative_float
from sugar_utils.libraries import load_package
from sugar_utils.settings import flag

NONE = "none"
FOLDER = "depths"
CONFIDENCE = "confidence"
FILES = (".png", ".tif", ".tiff", ".npy", ".exr")
MAX_SIDE = 512  # of a map that is kept
MIN_POINTS = 8  # observed points that tell whether a map fits, and scale and shift of one image
# A map fits if the median relative error of its points is at most this, or this share of the error
# that one depth for all points would have, and never more than a tenth.
FINE_ERROR = 0.03
CONSTANT_SHARE = 0.5
MAX_ERROR = 0.1
MAX_WRONG = 0.5  # if more maps do not fit, the rest fit by chance
SENSOR_ERROR = 1.5  # times the best fit's error up to which one scale for all is believed
UNITS = {"mm": 0.001, "m": 1.0}  # in metres, which are the scene's units where no points tell
_ROUNDS = 20  # of reweighted least squares
_flag = partial(flag, group="depth maps")

_Files = tuple[Path, Path | None]  # a depth map and its confidence
_DepthOf = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class DepthOptions:
    depths: str | None = _flag(
        None,
        "folder of depth maps of the photographs, in the scene folder or anywhere, from a "
        "sensor or an estimator; none: no depth maps; unset: depths/ of the scene folder, or those "
        "that transforms*.json names, where they are",
        metavar="{DIR,none}",
    )
    depth_weight: float = _flag(
        0.1,
        "weight of the relative error of the depth; falls to a tenth in the vanilla stage "
        "and stays there",
        parse=non_negative_float,
        no_effect_when="without depth maps",
    )
    depth_unit: str = _flag(
        AUTO,
        "mm or m: unit of the depth maps of a scene in metres; auto: millimetres for whole "
        "numbers, metres for floats",
        choices=(AUTO, *UNITS),
        no_effect_when="where observed points tell the scale",
    )


NO_DEPTHS = DepthOptions(depths=NONE)


@dataclass(frozen=True)
class DepthMap:
    path: Path
    values: Tensor  # along the view axis, world units, 0 where unknown; (h, w) float32


@dataclass(frozen=True)
class KnownDepths:
    """Depth maps of a scene by the name of the view; ``weight`` is that of their loss term."""

    maps: Mapping[str, DepthMap] = field(default_factory=dict)
    weight: float = 0.0
    unit: str = AUTO  # of ``UNITS``, if it was named

    def of(self, camera: Camera, device: torch.device) -> Tensor | None:
        """Depth of a view, 0 where unknown or masked out; None without a map. (H, W)"""
        known = self.maps.get(camera.name)
        if known is None:
            return None
        depth = _nearest(known.values, camera)
        if camera.shows_object:
            depth = depth * _nearest(torch.from_numpy(overview(camera) >= images.COUNTS), camera)
        return depth.to(device)


def _nearest(values: Tensor, camera: Camera) -> Tensor:
    """The value at each pixel of a view, of a map of any size. (h, w) -> (H, W)"""
    height, width = values.shape
    y = torch.arange(camera.height, device="cpu") * height // camera.height
    x = torch.arange(camera.width, device="cpu") * width // camera.width
    return values[y[:, None], x]


NOTHING_KNOWN = KnownDepths()


def known_depths(
    cameras: Sequence[Camera],
    root: Path,
    options: DepthOptions,
    observations: Observations | None,
    notify: Notify,
) -> KnownDepths:
    """Find and read the depth maps of the cameras, at their calibrated size, and align them."""
    paths = _find(cameras, root, options)
    if not paths:
        return NOTHING_KNOWN
    chosen = [camera for camera in cameras if camera.name in paths]
    raw = in_parallel(lambda camera: _read(camera, *paths[camera.name]), chosen)
    by_name = {camera.name: one.values for camera, one in zip(chosen, raw, strict=True)}
    if observations is None:
        is_whole = {camera.name: one.is_whole for camera, one in zip(chosen, raw, strict=True)}
        kind, depths = _in_metres(by_name, is_whole, options.depth_unit)
        wrong = {}
    else:
        kind, depths, wrong = _align(chosen, by_name, observations)
    told = shortened([f"{name} ({reason})" for name, reason in wrong.items()], 5)
    if len(wrong) > MAX_WRONG * len(by_name) or not depths:
        notify(f"left out all depth maps, which do not fit the points: {told or kind}")
        return NOTHING_KNOWN
    notify(f"depth maps of {len(depths)} of {len(cameras)} photographs, {kind}")
    if wrong:
        notify(f"left out {len(wrong)} depth maps that do not fit the points: {told}")
    maps = {
        name: DepthMap(paths[name][0], torch.from_numpy(_in_float32(values)))
        for name, values in depths.items()
    }
    unit = options.depth_unit if observations is None else AUTO
    return KnownDepths(maps, options.depth_weight, unit)


def _in_metres(
    values: Mapping[str, np.ndarray], is_whole: Mapping[str, bool], unit: str
) -> tuple[str, dict[str, np.ndarray]]:
    """Say what the values are taken for, and return depths in metres, where no points tell.

    Args:
        is_whole: Whether a map holds whole numbers, by its name.
        unit: One of ``UNITS``, or ``AUTO``.
    """
    units = {name: "mm" if is_whole[name] else "m" for name in values}
    if unit != AUTO:
        units = dict.fromkeys(values, unit)
        kind = f"in {unit} by --depth_unit"
    else:
        counts = {"mm": "whole numbers as millimetres", "m": "floats as metres"}
        parts = [text for name, text in counts.items() if name in units.values()]
        kind = f"{' and '.join(parts)}, because no points tell their scale (--depth_unit)"
    return kind, {name: UNITS[units[name]] * depth for name, depth in values.items()}


def _find(cameras: Sequence[Camera], root: Path, options: DepthOptions) -> dict[str, _Files]:
    asked = options.depths
    if asked == NONE or options.depth_weight == 0:
        return {}
    places = [root / FOLDER] if asked is None else [root / asked, Path(asked)]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        if asked is not None:
            raise UserError(f"--depths {asked}: no such folder, in {root} or by itself")
        named = {c.name: c.depth_path for c in cameras if c.depth_path is not None}
        return {name: (path, None) for name, path in named.items()}
    places = (folder, folder.parent / CONFIDENCE)
    maps, confidences = (
        ImagePlaces(ImageFolder(place, suffixes=FILES)).find_all(camera.name for camera in cameras)
        for place in places
    )
    found = {name: (path, confidences[name]) for name, path in maps.items()}
    found = {name: files for name, files in found.items() if files[0] is not None}
    if not found and asked is not None:
        raise UserError(
            f"{folder}: no depth map belongs to a photograph; name them as {cameras[0].name}.png"
        )
    return found


@dataclass(frozen=True)
class _RawMap:
    """The numbers of a file, before their unit is known."""

    values: np.ndarray  # 0 where unknown, (h, w) float64
    is_whole: bool  # whole numbers, as opposed to floats


def _read(camera: Camera, path: Path, confidence: Path | None) -> _RawMap:
    """Values of a map, without distortion."""
    numbers = _values_of(path)
    is_whole = numbers.dtype.kind in "ui"
    values = _clean(numbers.astype(np.float64))
    height, width = values.shape
    advice = "replace it, or pass --depths none"
    images.require_aspect(path, "depth map", (width, height), camera, advice)
    if confidence is not None:
        levels = _values_of(confidence)
        if levels.shape != values.shape:
            raise UserError(f"{confidence}: not the size of {path}; replace it, or remove it")
        values = np.where(levels >= (1 if levels.max() <= 2 else 128), values, 0.0)
    step = -(-max(width, height) // MAX_SIDE)
    values = values[step // 2 :: step, step // 2 :: step]
    return _RawMap(_undistorted(values, camera) if camera.lens else values, is_whole)


def _values_of(path: Path) -> np.ndarray:
    """A file's numbers, of its type. (h, w)"""
    advice = "replace the file, or pass --depths none"
    kinds = (*images.IMAGE_ERRORS, tokenize.TokenError, zipfile.BadZipFile, StopIteration)
    with explained(f"cannot read the depth map {path}:", advice, *kinds):
        if path.suffix.lower() == ".npy":
            values = np.load(require_regular_file(path), allow_pickle=False)
            if not isinstance(values, np.ndarray):
                raise ValueError("it is a ZIP file of arrays, not one array")
        elif path.suffix.lower() == ".exr":
            (exr,) = load_package(f"reading {path}", "OpenEXR", "OpenEXR")
            channels = exr.File(str(path)).channels()
            values = next(iter(channels.values())).pixels
        else:
            with images.open_image(path) as image:
                values = np.asarray(image)
        values = np.squeeze(values)
        if values.ndim == 3:
            values = values[..., 0]
        if values.ndim != 2 or values.dtype.kind not in "uif" or 0 in values.shape:
            raise ValueError(f"it holds {values.dtype} of shape {values.shape}, not one channel")
    return values


def _clean(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)


def _in_float32(values: np.ndarray) -> np.ndarray:
    """Depths in float32; those that it cannot hold are unknown."""
    with np.errstate(over="ignore"):
        return _clean(values.astype(np.float32))


def _undistorted(values: np.ndarray, camera: Camera) -> np.ndarray:
    """The nearest value of the map as it was taken, at the pixels of the undistorted view."""
    height, width = values.shape
    view = camera.resized(width, height)
    rays = pixel_rays(view, dtype=torch.float64, device="cpu").reshape(-1, 3).numpy()
    lens = images.lens_of(camera.lens, width, height)
    x, y = np.floor(lens.img_from_cam(rays, check_cheirality=False)).T
    inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    row, column = (np.where(inside, at, 0).astype(int) for at in (y, x))
    return np.where(inside, values[row, column], 0.0).reshape(height, width)


@dataclass(frozen=True)
class _Samples:
    """Values of a map and depths of points that its photograph observes. (n,) each"""

    values: np.ndarray
    depths: np.ndarray

    def error(self, depth_of: _DepthOf) -> float:
        """Median relative error of the depths that a model makes of the values."""
        return float(np.median(np.abs(depth_of(self.values) / self.depths - 1)))

    def fit(self, depth_of: _DepthOf) -> bool:
        constant = self.error(lambda values: np.full_like(values, np.median(self.depths)))
        limit = min(max(FINE_ERROR, CONSTANT_SHARE * constant), MAX_ERROR)
        return self.error(depth_of) <= limit


def _samples(camera: Camera, values: np.ndarray, observations: Observations) -> _Samples:
    seen = observations.seen(camera)
    if seen is None:
        return _Samples(np.empty(0), np.empty(0))
    height, width = values.shape
    column, row = (seen.pixels * (width / camera.width, height / camera.height)).astype(int).T
    at = values[row.clip(0, height - 1), column.clip(0, width - 1)]
    return _Samples(at[at > 0], seen.depths[at > 0])


def _align(
    cameras: Sequence[Camera], raw: Mapping[str, np.ndarray], observations: Observations
) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """What the values are; depths of the maps that fit; the others with the reason."""
    samples = {c.name: _samples(c, raw[c.name], observations) for c in cameras}
    known = {name: s for name, s in samples.items() if len(s.values) >= MIN_POINTS}
    if not known:
        return "which no point tells the scale of", {}, {}
    ratios = np.concatenate([s.depths / s.values for s in known.values()])
    scale = float(np.median(ratios))
    fits: dict[str, dict[str, _DepthOf]] = {
        "in one unit": dict.fromkeys(raw, lambda d: scale * d),
        "each with a scale and a shift": {n: _fitted(s, False) for n, s in known.items()},
        "reciprocals, each with a scale and a shift": {
            n: _fitted(s, True) for n, s in known.items()
        },
    }
    errors = {
        kind: median(known[name].error(model[name]) for name in known)
        for kind, model in fits.items()
    }
    sensor = next(iter(fits))
    best = min(errors, key=errors.__getitem__)
    kind = sensor if errors[sensor] <= SENSOR_ERROR * errors[best] else best
    depths = {}
    wrong = {}
    for name, depth_of in fits[kind].items():
        if name in known and not known[name].fit(depth_of):
            wrong[name] = f"off by {known[name].error(depth_of):.0%}"
        else:
            depths[name] = np.where(raw[name] > 0, depth_of(raw[name]), 0.0)
    return kind, depths, wrong


def _fitted(samples: _Samples, reciprocal: bool) -> _DepthOf:
    """Scale and shift with the least sum of relative errors, by reweighted least squares."""
    d = samples.values
    z = samples.depths
    target, relative = (1 / z, z) if reciprocal else (z, 1 / z)
    weights = np.ones_like(d)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights) * relative
        rows = np.stack([d, np.ones_like(d)], axis=1) * root[:, None]
        line = np.linalg.lstsq(rows, target * root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(line[0] * d + line[1] - target) * relative, 1e-3)
    scale = float(line[0])
    shift = float(line[1])

    def depth_of(values: np.ndarray) -> np.ndarray:
        found = scale * values + shift
        with np.errstate(divide="ignore"):
            return 1 / found if reciprocal else found

    return depth_of
