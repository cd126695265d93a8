# SPDX-License-Identifier: Apache-2.0
"""Depth maps of a capture, converted to the units of the scene.

| program | files |
|---|---|
| scanning apps, 3DGS data, monocular estimators | ``depths/STEM.*`` or ``depths/NAME.EXT.*`` |
| nerfstudio | ``depth_file_path`` of each frame in ``transforms.json`` |
| Polycam and others | ``confidence/STEM.*`` beside the folder: 0 to 2, or 0 to 255 |

Files are 16-bit PNG, TIFF, NPY or EXR of any size with the aspect ratio of the image. Values of 0
and values that are not finite are unknown. Where no points tell the scale, whole numbers are
millimetres and floats are metres, whatever the file format. Values are depths z up to one scale for
all (of a sensor), or up to a scale and a shift for each image, of the depth or of its reciprocal
(of an estimator): the model that fits the observed points best is used. A map that does not fit
them is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.maps.estimators.estimated_depths import ESTIMATORS, estimate_depths
from gaussian_splatting.data.maps.map_files import (
    MAX_SIDE,
    NONE,
    find_folder,
    find_maps,
    nearest_values,
    read_numbers,
    reduced,
    undistorted,
)
from gaussian_splatting.data.masks import overview
from gaussian_splatting.data.observations import Observations, median
from gaussian_splatting.data.scans.scan_depths import depth_of_points, point_spacing
from gaussian_splatting.data.scans.scan_files import SCAN_SUFFIXES
from gaussian_splatting.data.scans.scan_frame import ScanFrame, scan_in_scene, without_offset
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import in_parallel
from sugar_utils.flags import AUTO, non_negative_float
from sugar_utils.settings import flag

FOLDER = "depths"
CONFIDENCE = "confidence"
MAX_DEPTH_POINTS = 4_000_000  # of a scan
MIN_POINTS = 8  # observed points for checking a map, and fitting its scale and shift
# A map fits if the median relative error of its points is at most this, or this share of the error
# that one depth for all points would have, and never more than a tenth.
FINE_ERROR = 0.03
CONSTANT_SHARE = 0.5
MAX_ERROR = 0.1
MAX_WRONG = 0.5  # if more maps do not fit, the rest fit by chance
SENSOR_ERROR = 1.5  # times the best fit's error up to which one scale for all is believed
UNITS = {"mm": 0.001, "m": 1.0}  # in metres, which are the scene's units where no points tell
_UNIT_TEXTS = {"mm": "whole numbers as millimetres", "m": "floats as metres"}
_LEAST_CONFIDENCE = 1  # of 0 to 2
_LEAST_CONFIDENCE_BYTE = 128  # of 0 to 255
_ROUNDS = 20  # of reweighted least squares
_IN_ONE_UNIT = "in one unit"
_LINEAR = "each with a scale and a shift"
_RECIPROCAL = "reciprocals, each with a scale and a shift"
_ADVICE = "replace the file, or pass --depths none"
_flag = partial(flag, group="depth maps")

_DepthOf = Callable[[np.ndarray], np.ndarray]  # from the values of a map to depths


@dataclass(frozen=True)
class DepthOptions:
    """Flags for depth maps."""

    depths: str | None = _flag(
        None,
        "folder of depth maps of the photographs, in the scene folder or anywhere, from a "
        "sensor or an estimator; or a laser scan in the world of the scene (.las, .laz, .e57, "
        ".ply), whose points are seen from each photograph; moge, da3, metric3d: estimated by "
        "MoGe-2, Depth Anything 3 or Metric3D v2, if it is installed, and kept in depths_NAME/ of "
        "the scene folder; none: no depth maps; unset: depths/ of the scene folder, or those that "
        "transforms*.json names, where they are",
        metavar="{DIR,SCAN,moge,da3,metric3d,none}",
    )
    depth_weight: float = _flag(
        0.5,
        "weight of the relative error of the depth where photographs have no texture; falls to a "
        "tenth in the vanilla stage and stays there",
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
    """The depth map of one view."""

    path: Path
    values: Tensor  # along the view axis, world units, 0 where unknown; (h, w) float32


@dataclass(frozen=True)
class KnownDepths:
    """Depth maps of a scene by the name of the view."""

    maps: Mapping[str, DepthMap] = field(default_factory=dict)
    weight: float = 0.0  # of their loss term
    unit: str = AUTO  # of ``UNITS``, if it was named

    def of(self, camera: Camera, device: torch.device) -> Tensor | None:
        """Return the depth of a view, 0 where unknown or masked out; None without a map. (H, W)"""
        depth_map = self.maps.get(camera.name)
        if depth_map is None:
            return None
        depth = nearest_values(depth_map.values, camera)
        if camera.shows_object:
            is_object = torch.from_numpy(overview(camera) >= images.COUNTS)
            depth = depth * nearest_values(is_object, camera)
        return depth.to(device)


NOTHING_KNOWN = KnownDepths()


class ScanWorld(NamedTuple):
    """The world in which a scan is expected."""

    points: np.ndarray  # of the reconstruction, may be none, world units, (P, 3)
    offset: np.ndarray  # subtracted from the original coordinates, (3,)


class _DepthFiles(NamedTuple):
    """The files of one depth map."""

    path: Path
    confidence: Path | None = None


@dataclass(frozen=True)
class _RawMap:
    """The numbers of a file, before their unit is known."""

    values: np.ndarray  # 0 where unknown, (h, w) float64
    is_whole: bool  # whole numbers, as opposed to floats


@dataclass(frozen=True)
class _AlignedMaps:
    """Depth maps in the units of the scene."""

    kind: str  # what the values were taken for, for messages
    depths: dict[str, np.ndarray]  # of the maps that fit, by name, 0 where unknown, (h, w)
    wrong: dict[str, str]  # reasons for the others


def known_depths(
    cameras: Sequence[Camera],
    root: Path,
    options: DepthOptions,
    observations: Observations | None,
    notify: Notify,
    world: ScanWorld | None = None,
) -> KnownDepths:
    """Find and read the depth maps of the cameras, at their calibrated size, and align them.

    Args:
        world: Where a scan is expected; None: ``depths`` names none.
    """
    scan_file = scan_named(root, options)
    if scan_file is not None and options.depth_weight > 0 and world is not None:
        return _scan_depths(cameras, scan_file, options, world, notify)
    if options.depths in ESTIMATORS and options.depth_weight > 0:
        folder = estimate_depths(cameras, root, options.depths, notify)
        options = replace(options, depths=str(folder))
    files = _find_files(cameras, root, options)
    if not files:
        return NOTHING_KNOWN
    with_files = [camera for camera in cameras if camera.name in files]
    raw_maps = in_parallel(lambda camera: _read(camera, files[camera.name]), with_files)
    by_name = {camera.name: raw for camera, raw in zip(with_files, raw_maps, strict=True)}
    if observations is None:
        aligned = _in_metres(by_name, options.depth_unit)
    else:
        aligned = _align(with_files, by_name, observations)
    reasons = shortened([f"{name} ({reason})" for name, reason in aligned.wrong.items()], 5)
    if len(aligned.wrong) > MAX_WRONG * len(by_name) or not aligned.depths:
        notify(f"left out all depth maps, which do not fit the points: {reasons or aligned.kind}")
        return NOTHING_KNOWN
    notify(f"depth maps of {len(aligned.depths)} of {len(cameras)} photographs, {aligned.kind}")
    if aligned.wrong:
        notify(f"left out {len(aligned.wrong)} depth maps that do not fit the points: {reasons}")
    maps = {}
    for name, values in aligned.depths.items():
        maps[name] = DepthMap(files[name].path, torch.from_numpy(_in_float32(values)))
    unit = options.depth_unit if observations is None else AUTO
    return KnownDepths(maps, options.depth_weight, unit)


def scan_named(root: Path, options: DepthOptions) -> Path | None:
    """Return the scan that ``depths`` names, in the scene folder or by itself; None for others.

    Raises:
        UserError: There is no such file.
    """
    name = options.depths
    if name is None or Path(name).suffix.lower() not in (*SCAN_SUFFIXES, ".ply"):
        return None
    candidates = [root / name, Path(name)]
    for path in candidates:
        if path.is_dir():
            return None
        if path.is_file():
            return path
    raise UserError(f"--depths {name}: no such file, in {root} or by itself")


def _scan_depths(
    cameras: Sequence[Camera], path: Path, options: DepthOptions, world: ScanWorld, notify: Notify
) -> KnownDepths:
    """Return the depth of a scan's points in each view."""
    frame = ScanFrame.of(cameras, world.points)
    to_world = without_offset(world.offset)
    scan = scan_in_scene(path, frame, MAX_DEPTH_POINTS, notify, to_world)
    spacing = point_spacing(scan.positions)

    def depth(camera: Camera) -> np.ndarray:
        return depth_of_points(scan.positions, camera.reduced(MAX_SIDE), spacing)

    maps = {}
    covered = []
    for camera, values in zip(cameras, in_parallel(depth, cameras), strict=True):
        if values.any():
            maps[camera.name] = DepthMap(path, torch.from_numpy(_in_float32(values)))
            covered.append(float((values > 0).mean()))
    if not maps:
        raise UserError(f"{path}: no photograph shows a point of the scan; check its frame")
    notify(
        f"depth of {path.name} in {len(maps)} of {len(cameras)} photographs, "
        f"{np.median(covered):.0%} of the pixels"
    )
    return KnownDepths(maps, options.depth_weight)


def _in_metres(raw_maps: Mapping[str, _RawMap], unit: str) -> _AlignedMaps:
    """Convert maps to metres, where no points determine their scale.

    Args:
        unit: One of ``UNITS``, or ``AUTO``.
    """
    units = {}
    for name, raw in raw_maps.items():
        automatic = "mm" if raw.is_whole else "m"
        units[name] = automatic if unit == AUTO else unit
    if unit == AUTO:
        used_units = set(units.values())
        texts = [text for name, text in _UNIT_TEXTS.items() if name in used_units]
        kind = f"{' and '.join(texts)}, because no points tell their scale (--depth_unit)"
    else:
        kind = f"in {unit} by --depth_unit"
    depths = {name: UNITS[units[name]] * raw.values for name, raw in raw_maps.items()}
    return _AlignedMaps(kind, depths, wrong={})


def _find_files(
    cameras: Sequence[Camera], root: Path, options: DepthOptions
) -> dict[str, _DepthFiles]:
    """Return the files of the depth map of each view that has one."""
    if options.depths == NONE or options.depth_weight == 0:
        return {}
    folder = find_folder(root, options.depths, FOLDER, "--depths")
    if folder is None:
        return {c.name: _DepthFiles(c.depth_path) for c in cameras if c.depth_path is not None}
    confidences = find_maps(cameras, folder.parent / CONFIDENCE)
    files = {}
    for name, path in find_maps(cameras, folder).items():
        files[name] = _DepthFiles(path, confidences.get(name))
    if not files and options.depths is not None:
        raise UserError(
            f"{folder}: no depth map belongs to a photograph; name them as {cameras[0].name}.png"
        )
    return files


def _read(camera: Camera, files: _DepthFiles) -> _RawMap:
    """Read a map, reduced and without distortion."""
    path = files.path
    numbers = one_channel(read_numbers(path, "depth map", _ADVICE), path)
    is_whole = numbers.dtype.kind in "ui"
    values = _clean(numbers.astype(np.float64))
    height, width = values.shape
    images.require_aspect(path, "depth map", (width, height), camera, _ADVICE)
    if files.confidence is not None:
        levels = one_channel(read_numbers(files.confidence, "depth map", _ADVICE), files.confidence)
        if levels.shape != values.shape:
            raise UserError(f"{files.confidence}: not the size of {path}; replace it, or remove it")
        is_small_scale = levels.max() <= 2
        least = _LEAST_CONFIDENCE if is_small_scale else _LEAST_CONFIDENCE_BYTE
        values = np.where(levels >= least, values, 0.0)
    values = reduced(values)
    if camera.lens:
        values = undistorted(values, camera)
    return _RawMap(values, is_whole)


def one_channel(values: np.ndarray, path: Path) -> np.ndarray:
    """Return the numbers of a depth map, the first channel of several. (h, w)"""
    if values.ndim == 3:
        values = values[..., 0]
    if values.ndim != 2 or values.dtype.kind not in "uif" or 0 in values.shape:
        raise UserError(
            f"cannot read the depth map {path}: it holds {values.dtype} of shape {values.shape}, "
            f"not one channel; {_ADVICE}"
        )
    return values


def _clean(values: np.ndarray) -> np.ndarray:
    """Set values that are not finite or not positive to 0."""
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)


def _in_float32(values: np.ndarray) -> np.ndarray:
    """Convert depths to float32; those that it cannot hold become unknown."""
    with np.errstate(over="ignore"):
        return _clean(values.astype(np.float32))


@dataclass(frozen=True)
class _Samples:
    """Values of a map and depths of the points that its image observes. (n,) each"""

    values: np.ndarray
    depths: np.ndarray

    def error(self, depth_of: _DepthOf) -> float:
        """Return the median relative error of the depths that a model makes of the values."""
        ratios = depth_of(self.values) / self.depths
        return float(np.median(np.abs(ratios - 1)))

    def fit(self, depth_of: _DepthOf) -> bool:
        """Whether the map fits the points by a model."""
        middle = np.median(self.depths)
        constant_error = self.error(lambda values: np.full_like(values, middle))
        limit = min(max(FINE_ERROR, CONSTANT_SHARE * constant_error), MAX_ERROR)
        return self.error(depth_of) <= limit


def _sample(camera: Camera, values: np.ndarray, observations: Observations) -> _Samples:
    """Read a map at the points that its image observes."""
    points = observations.seen(camera)
    if points is None:
        return _Samples(np.empty(0), np.empty(0))
    height, width = values.shape
    scale = (width / camera.width, height / camera.height)
    columns, rows = (points.pixels * scale).astype(int).T
    sampled = values[rows.clip(0, height - 1), columns.clip(0, width - 1)]
    is_known = sampled > 0
    return _Samples(sampled[is_known], points.depths[is_known])


def _align(
    cameras: Sequence[Camera], raw_maps: Mapping[str, _RawMap], observations: Observations
) -> _AlignedMaps:
    """Fit all models to the observed points, and convert the maps by the best one."""
    samples = {}
    for camera in cameras:
        sample = _sample(camera, raw_maps[camera.name].values, observations)
        if len(sample.values) >= MIN_POINTS:
            samples[camera.name] = sample
    if not samples:
        return _AlignedMaps("which no point tells the scale of", depths={}, wrong={})
    models = _fit_models(raw_maps, samples)
    kind = _best_kind(models, samples)
    depths = {}
    wrong = {}
    for name, depth_of in models[kind].items():
        sample = samples.get(name)
        if sample is not None and not sample.fit(depth_of):
            wrong[name] = f"off by {sample.error(depth_of):.0%}"
            continue
        values = raw_maps[name].values
        depths[name] = np.where(values > 0, depth_of(values), 0.0)
    return _AlignedMaps(kind, depths, wrong)


def _fit_models(
    raw_maps: Mapping[str, _RawMap], samples: Mapping[str, _Samples]
) -> dict[str, dict[str, _DepthOf]]:
    """Fit each kind of model: for all maps one scale, or for each its own scale and shift."""
    ratios = np.concatenate([sample.depths / sample.values for sample in samples.values()])
    scale = float(np.median(ratios))

    def scaled(values: np.ndarray) -> np.ndarray:
        return scale * values

    return {
        _IN_ONE_UNIT: dict.fromkeys(raw_maps, scaled),
        _LINEAR: {name: _fit_line(sample) for name, sample in samples.items()},
        _RECIPROCAL: {name: _fit_reciprocal(sample) for name, sample in samples.items()},
    }


def _best_kind(
    models: Mapping[str, Mapping[str, _DepthOf]], samples: Mapping[str, _Samples]
) -> str:
    """Return the kind of model that fits best; one unit for all where that is nearly as good."""
    errors = {}
    for kind, depth_of in models.items():
        errors[kind] = median(sample.error(depth_of[name]) for name, sample in samples.items())
    best = min(errors, key=errors.__getitem__)
    if errors[_IN_ONE_UNIT] <= SENSOR_ERROR * errors[best]:
        return _IN_ONE_UNIT
    return best


def _fit_line(samples: _Samples) -> _DepthOf:
    """Fit depths as a scale and a shift of the values."""
    depths = samples.depths
    scale, shift = _robust_line(samples.values, depths, 1 / depths)

    def depth_of(values: np.ndarray) -> np.ndarray:
        return scale * values + shift

    return depth_of


def _fit_reciprocal(samples: _Samples) -> _DepthOf:
    """Fit reciprocals of depths as a scale and a shift of the values."""
    depths = samples.depths
    scale, shift = _robust_line(samples.values, 1 / depths, depths)

    def depth_of(values: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return 1 / (scale * values + shift)

    return depth_of


def _robust_line(
    values: np.ndarray, target: np.ndarray, relative: np.ndarray
) -> tuple[float, float]:
    """Return scale and shift with the least sum of errors, by reweighted least squares.

    Args:
        values: (n,)
        target: Is approximated by ``scale * values + shift``. (n,)
        relative: Weight of the error of each value. (n,)
    """
    weights = np.ones_like(values)
    columns = np.stack([values, np.ones_like(values)], axis=1)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights) * relative
        line = np.linalg.lstsq(columns * root[:, None], target * root, rcond=None)[0]
        errors = np.abs(line[0] * values + line[1] - target) * relative
        weights = 1 / np.maximum(errors, 1e-3)
    return float(line[0]), float(line[1])
