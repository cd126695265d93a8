# SPDX-License-Identifier: Apache-2.0
"""Finding the masks of a capture's images, under the names that programs give them, and checking
them before anything is written.

| program | files |
|---|---|
| COLMAP | ``masks/NAME.EXT.png`` |
| Brush and many apps | ``masks/STEM.*`` |
| others | ``masks/STEM_mask.*``, ``STEM-mask.*``, ``STEM.mask.*``, ``NAME.EXT.mask.*`` |
| 2DGS, PGSR, GOF, DTU data | ``mask/000.png``, by the images' numbers or order |
| nerfstudio | ``mask_path`` of each frame in ``transforms.json`` |
| NeRF-synthetic, cut-outs | alpha channel of the photograph |

In all of them black pixels do not count; see :mod:`~gaussian_splatting.data.mask_levels`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data import images, mask_levels
from gaussian_splatting.data.cameras import Camera, MaskMode, ViewMask
from gaussian_splatting.data.mask_levels import MaskLevels
from gaussian_splatting.data.names import (
    IMAGE_SUFFIXES,
    ImageFolder,
    natural_order,
    paired_by_number,
)
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import atomic_path, in_parallel
from sugar_utils.flags import AUTO
from sugar_utils.settings import flag

NONE = "none"
ALPHA = "alpha"
REMBG = "rembg"
FOUND = (AUTO, REMBG)  # masks that the vanilla stage makes; later stages find them
FOLDERS = ("masks", "mask")  # folders of a scene that are taken for masks unasked
OVERVIEW_SIDE = 512  # longest side in pixels of the small masks that are checked and carve the hull
MAX_BLACK_SHARE = 0.25  # if of more masks nothing counts, they are no masks
_ENDINGS = ("_mask", "-mask", ".mask")
"""Endings of masks' names behind the image's name, with its extension or without."""

_KEPT_OVERVIEWS = 4096
_MEANING = {
    "object": "the background is ignored (--mask_mode object)",
    "ignore": "what is black in them is ignored (--mask_mode ignore)",
}
_flag = partial(flag, group="masks")
TOLERANCE = 2  # pixels of the small masks by which a point may lie outside: poses are that wrong
OUTLINE_ERRORS = 1.0  # the same in outline errors of the masks, where those are imprecise
VOTES_SHARE = 0.1
"""A point is outside if at least this share of the views that show it vote against it."""
MIN_VOTES = 1.5
FEW_VIEWS_SHARE = 0.25
"""Votes that are needed in any case, or this share of the views where that is less."""
_MIN_Z = 1e-6
_STEPS = 4  # steps of a pixel in which distances are stored, which end at 255 steps


@dataclass(frozen=True)
class MaskOptions:
    """Flags for masks."""

    masks: str | None = _flag(
        None,
        "folder of the masks, in the scene folder or anywhere; alpha: the transparency of "
        "the photographs; auto: the object that all photographs look at, estimated by the "
        "vanilla stage; rembg: the foreground that this package finds in each photograph, if it is "
        "installed; none: no masks; unset: masks/ or mask/ of the scene folder, or those "
        "that transforms*.json names, where they are",
        metavar="{DIR,alpha,auto,rembg,none}",
        task="input",
    )
    mask_mode: MaskMode = _flag(
        "object",
        "object: reconstruct the masked object alone, on an empty background; ignore: black "
        "pixels, such as people and tripods, do not count",
        choices=get_args(MaskMode),
        no_effect_when="without masks",
    )


NO_MASKS = MaskOptions(masks=NONE)


def with_masks(
    cameras: Sequence[Camera], root: Path, options: MaskOptions, notify: Notify
) -> list[Camera]:
    """Return the cameras with the masks that their images have, after all checks.

    Args:
        root: Scene folder.

    Raises:
        UserError: Named masks are not there, do not fit, or are black.
    """
    mask_files = _find(cameras, root, options)
    if mask_files is None:
        return list(cameras)
    place = mask_files.place
    if not any(mask_files.masks):
        advice = f"{place}: no mask belongs to a photograph; name them as {cameras[0].name}"
        if options.masks is not None:
            raise UserError(f"{advice}.png, or number them, or pass --masks none")
        notify(f"note: {advice}.png to use them; going on without masks")
        return list(cameras)
    masked = []
    for camera, mask in zip(cameras, mask_files.masks, strict=True):
        masked.append(replace(camera, mask=mask))
    in_parallel(_check, masked)
    masked = _with_white(masked, notify)
    _refuse_black(masked)
    missing = [camera.name for camera in masked if camera.mask is None]
    n = len(masked)
    n_masks = n - len(missing)
    notify(f"masks of {n_masks} of {n} photographs: {place}; {_MEANING[options.mask_mode]}")
    if missing:
        notify(
            f"note: {len(missing)} of {n} photographs have no mask and count whole "
            f"({shortened(missing)})"
        )
    return masked


def _refuse_black(cameras: Sequence[Camera]) -> None:
    """Raise a ``UserError`` if nothing counts in so many masks that they are no masks."""
    empty = [camera for camera in cameras if counts_nowhere(camera)]
    if len(empty) <= MAX_BLACK_SHARE * len(cameras):
        return
    first = empty[0]
    reason = "the mask is all black"
    if _file_overview(first).values.any():
        reason = f"no pixel of the mask is at least {images.COUNTS} of 255"
    raise UserError(
        f"{first.image_mask.path}: {reason}, so nothing of {first.name} would count; remove the "
        "mask, or the photograph"
    )


def _with_white(cameras: Sequence[Camera], notify: Notify) -> list[Camera]:
    """Return the cameras with masks that know which brightness of the capture's masks is white."""
    masked = [camera for camera in cameras if camera.mask is not None and not camera.mask.alpha]
    levels = []
    for camera in masked:
        file_levels = _file_overview(camera).levels
        if file_levels is not None:
            levels.append((camera.image_mask.path.name, file_levels))
    white = mask_levels.white_of([level for _, level in levels])
    line = mask_levels.description(levels, white)
    if line is not None:
        notify(line)
    if white == mask_levels.WHITE:
        return list(cameras)
    renewed = []
    for camera in cameras:
        mask = camera.mask
        if mask is not None and not mask.alpha:
            mask = replace(mask, white=white)
        renewed.append(replace(camera, mask=mask))
    in_parallel(overview, [camera for camera in renewed if camera.mask is not None])
    return renewed


def counts_nowhere(camera: Camera) -> bool:
    """Whether a view has a mask without a valid pixel."""
    return camera.mask is not None and not _file_overview(camera).counts_somewhere


def require_counted_pixels(cameras: Sequence[Camera]) -> None:
    """Raise a ``UserError`` if no pixel of any view counts at the size of the cameras."""
    if all(_is_empty(camera) for camera in cameras):
        first = cameras[0]
        raise UserError(
            f"{first.image_mask.path}: at {first.width} x {first.height} px no pixel of any "
            "training view counts in the masks; use larger images or other masks, or --masks none"
        )


def _is_empty(camera: Camera) -> bool:
    if camera.mask is None or (overview(camera) >= images.COUNTS).any():
        return False
    # Thin parts are lost in a small mask only.
    values = images.decode_mask(camera.mask, *camera.size)
    return not (values >= images.COUNTS).any()


@dataclass(frozen=True, eq=False)
class _Overview:
    """A reduced mask file."""

    values: np.ndarray  # above 0 where any of it counts, (H, W) uint8
    levels: MaskLevels | None  # values of the file; None of a photograph's transparency
    counts_somewhere: bool  # at the size of the file


def overview(camera: Camera) -> np.ndarray:
    """Return the mask of a camera, reduced; above 0 where any of it counts. (H, W) uint8

    Its longest side has at most ``OVERVIEW_SIDE`` pixels.
    """
    return _file_overview(camera).values


def _file_overview(camera: Camera) -> _Overview:
    small = camera.reduced(OVERVIEW_SIDE)
    mask = camera.image_mask
    status = mask.path.stat()
    version = (status.st_mtime_ns, status.st_size)
    return _overview(mask, small.width, small.height, version)


@functools.lru_cache(maxsize=_KEPT_OVERVIEWS)
def _overview(mask: ViewMask, width: int, height: int, version: object) -> _Overview:
    """Read a mask file; cached, because every stage of a pipeline reads the same masks.

    Args:
        version: Time and size of the file, by which a change is noticed.
    """
    file_values, levels = images.read_mask(mask)
    values = images.resized_mask(file_values, width, height)
    values.setflags(write=False)
    return _Overview(values, levels, bool((file_values >= images.COUNTS).any()))


def object_mask_path(folder: Path, name: str) -> Path:
    """Return the path of the mask of an image in a folder of estimated masks."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    inner_parts = [part for part in parts if part not in ("/", "..")]
    file_name = f"{PurePosixPath(parts[-1]).name}.png"
    return folder.joinpath(*inner_parts).with_name(file_name)


def write_object_mask(folder: Path, name: str, values: np.ndarray) -> None:
    """Write the mask of an image, (H, W) uint8, where :func:`object_mask_path` has it."""
    with atomic_path(object_mask_path(folder, name)) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")


def with_object_masks(cameras: Sequence[Camera], folder: Path) -> list[Camera]:
    """Return the cameras with the estimated masks of a folder in place of their own."""
    masked = []
    for camera in cameras:
        path = object_mask_path(folder, camera.name)
        if path.is_file():
            camera = replace(camera, mask=ViewMask(path, "object"))
        masked.append(camera)
    return masked


def with_transient_masks(cameras: Sequence[Camera], folder: Path) -> list[Camera]:
    """Return the cameras with the transient masks of a folder.

    They hold what the masks of the capture leave out as well. Masks of objects stay.
    """
    masked = []
    for camera in cameras:
        path = object_mask_path(folder, camera.name)
        if not camera.shows_object and path.is_file():
            camera = replace(camera, mask=ViewMask(path, "ignore"))
        masked.append(camera)
    return masked


class _MaskFiles(NamedTuple):
    """The masks of all views, before they are checked."""

    place: str  # where they are, for messages
    masks: list[ViewMask | None]  # of each camera


def _find(cameras: Sequence[Camera], root: Path, options: MaskOptions) -> _MaskFiles | None:
    """Find the masks of the flags or of the scene; None if there are none."""
    setting = options.masks
    mode = options.mask_mode
    if setting in (NONE, *FOUND):
        return None
    if setting == ALPHA:
        return _alpha_masks(cameras, root, mode)
    if setting is not None:
        for folder in (root / setting, Path(setting)):
            if folder.is_dir():
                return _in_folder(cameras, folder, mode)
        raise UserError(f"--masks {setting}: no such folder, in {root} or by itself")
    if any(camera.mask_path for camera in cameras):
        masks = [_of_file(camera, camera.mask_path, mode) for camera in cameras]
        return _MaskFiles(f"named by transforms*.json of {root}", masks)
    for name in FOLDERS:
        if (root / name).is_dir():
            return _in_folder(cameras, root / name, mode)
    return None


def _alpha_masks(cameras: Sequence[Camera], root: Path, mode: MaskMode) -> _MaskFiles:
    masks = []
    for camera in cameras:
        path = camera.image_file
        masks.append(ViewMask(path, mode, alpha=True) if _is_transparent(path) else None)
    if not any(masks):
        raise UserError(f"--masks alpha: no photograph of {root} has an alpha channel; make masks")
    return _MaskFiles("alpha channels", masks)


def _is_transparent(path: Path | None) -> bool:
    if path is None:
        return False
    with images.open_image(path) as image:
        return images.has_alpha(image)


def _of_file(camera: Camera, path: Path | None, mode: MaskMode) -> ViewMask | None:
    # An image that was undistorted has a mask that was not.
    return None if path is None else ViewMask(path, mode, lens=camera.lens)


def _in_folder(cameras: Sequence[Camera], folder: Path, mode: MaskMode) -> _MaskFiles:
    """Find the masks of a folder by the names of the images, or by their numbers."""
    mask_folder = ImageFolder(folder)
    names = [PurePosixPath(camera.name.replace("\\", "/")) for camera in cameras]
    name_counts = Counter(name.name for name in names)
    paths: list[Path | None] = []
    ambiguous: Counter[Path | None] = Counter()
    for name in names:
        is_unique = name_counts[name.name] == 1
        path = _find_by_name(mask_folder, name, is_unique)
        paths.append(path)
        if not is_unique:
            ambiguous[path] += 1
    # A mask that several images of one name lead to belongs to none of them.
    paths = [None if ambiguous[path] > 1 else path for path in paths]
    if not all(paths):
        paths = _by_number(cameras, folder) or paths
    masks = [_of_file(camera, path, mode) for camera, path in zip(cameras, paths, strict=True)]
    return _MaskFiles(str(folder), masks)


def _find_by_name(folder: ImageFolder, name: PurePosixPath, is_unique: bool) -> Path | None:
    """Find the mask of an image.

    Args:
        is_unique: Whether no other image has the same last part of its name.
    """
    places = [name]
    if is_unique:
        places.append(PurePosixPath(name.name))
    candidates = [str(place) for place in places]
    for ending in _ENDINGS:
        for place in places:
            candidates.append(f"{place}{ending}")
            candidates.append(f"{place.with_suffix('')}{ending}")
    for candidate in candidates:
        path = folder.find(candidate)
        if path is not None:
            return path
    return None


def _by_number(cameras: Sequence[Camera], folder: Path) -> list[Path | None] | None:
    """Find masks that are named by numbers alone, as DTU's are; None where there are others."""
    masks = _images_in(folder)
    photographs: list[Path] = []
    for camera in cameras:
        file = camera.source_path or camera.image_path
        if file is None:
            return None
        photographs.append(file)
    if not masks or not all(path.stem.isdecimal() for path in masks):
        return None
    if len({path.parent for path in photographs}) > 1:
        return None
    files = [path.name for path in _images_in(photographs[0].parent)]
    pairs = paired_by_number([path.name for path in masks], files)
    if pairs is None:
        raise UserError(
            f"{folder}: it is unclear which of the {len(masks)} numbered masks belongs to which of "
            f"the {len(files)} photographs ({masks[0].name} to {masks[-1].name}, {files[0]} to "
            f"{files[-1]}); name masks like their photographs, or pass --masks none"
        )
    names = [pairs.get(path.name) for path in photographs]
    return [None if name is None else folder / name for name in names]


def _images_in(folder: Path) -> list[Path]:
    files = []
    for path in folder.iterdir():
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("."):
            files.append(path)
    return sorted(files, key=lambda path: natural_order(path.name))


def _check(camera: Camera) -> None:
    mask = camera.mask
    if mask is None:
        return
    if not mask.alpha:
        advice = "make masks of the photographs as they are, or switch them off with --masks none"
        images.require_aspect(mask.path, "mask", images.image_size(mask.path), camera, advice)
    overview(camera)


def is_outside(votes: Tensor, shown_by: Tensor) -> Tensor:
    """Whether points have enough votes to be outside of the object.

    Args:
        votes: Sum of the votes that a point is outside. (N,)
        shown_by: Sum of the weights of the views that show it. (N,)
    """
    needed = (FEW_VIEWS_SHARE * shown_by).clamp_max(MIN_VOTES)
    needed = torch.maximum(VOTES_SHARE * shown_by, needed)
    return (votes >= needed) & (votes > 0)


def distance_outside(mask: Tensor) -> Tensor:
    """Return the distance of each pixel from a mask in quarters of a pixel. (H, W) bool -> uint8"""
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import distance_transform_edt

    if not bool(mask.any()):
        return torch.full(mask.shape, 255, dtype=torch.uint8, device=mask.device)
    distances = np.asarray(distance_transform_edt(~mask.cpu().numpy())) * _STEPS
    rounded = np.minimum(np.rint(distances), 255).astype(np.uint8)
    return torch.from_numpy(rounded).to(mask.device)


@dataclass(frozen=True, eq=False)
class KnownSurface:
    """Parts of a surface that photographs showed, among points that are judged.

    A mask that leaves out such a part is wrong there.
    """

    parts: Tensor  # number of the part to which each point belongs, (N,) int64
    is_known: Tensor  # which points lie on the part; the others lie near it. (N,) bool

    def errors(self, distances: Tensor) -> Tensor:
        """Return by how many pixels a mask leaves out the part of each point. (N,)

        Args:
            distances: Of the points from the mask, (N,) pixels; 0 in it and where it shows none.
        """
        largest = distances.new_zeros(int(self.parts.max()) + 1)
        largest.scatter_reduce_(0, self.parts, distances * self.is_known, "amax")
        return largest[self.parts]


@dataclass(frozen=True, eq=False)
class VisualHull:
    """The space that masks of an object leave: a point is in it if few views exclude it."""

    cameras: tuple[Camera, ...]  # at the size of the distances
    # Distances from the masks, as of :func:`distance_outside`, (H, W) uint8 each.
    distances: tuple[Tensor, ...]
    tolerance: float = float(TOLERANCE)  # pixels by which a point may lie outside of a mask
    weights: tuple[float, ...] | None = None  # of the views; None for 1

    def votes(self, points: Tensor, known: KnownSurface | None = None) -> tuple[Tensor, Tensor]:
        """Return the votes of the views that points, (N, 3), are outside of the object.

        A vote grows from 0 at the tolerance to the weight of the view at twice that distance, at
        least one pixel later. A view that does not show a point has no vote.

        Args:
            known: Surface among the points; masks have the tolerance that it needs, at least.

        Returns:
            Sums of the votes, and of the weights of the views that show a point. (N,), (N,) float32
        """
        votes = torch.zeros(points.shape[0], dtype=torch.float32, device=points.device)
        shown_by = torch.zeros_like(votes)
        points = points.detach().float()
        weights = self.weights or [1.0] * len(self.cameras)
        for camera, distance, weight in zip(self.cameras, self.distances, weights, strict=True):
            view_x, view_y, depth = camera.coordinates(points).unbind(dim=-1)
            u = camera.fx * view_x / depth + camera.cx
            v = camera.fy * view_y / depth + camera.cy
            is_shown = (depth > _MIN_Z) & (u >= 0) & (v >= 0)
            is_shown &= (u < camera.width) & (v < camera.height)
            rows = torch.where(is_shown, v, 0).long()
            columns = torch.where(is_shown, u, 0).long()
            outside = (distance[rows, columns].float() / _STEPS) * is_shown
            tolerance = torch.full_like(outside, self.tolerance)
            if known is not None:
                tolerance = torch.maximum(tolerance, known.errors(outside))
            beyond = outside - tolerance
            votes += (beyond / max(self.tolerance, 1.0)).clamp(0, 1) * is_shown * weight
            shown_by += is_shown * weight
        return votes, shown_by

    def contains(self, points: Tensor) -> Tensor:
        """Whether too few masks exclude points. (N, 3) -> (N,) bool"""
        votes, shown_by = self.votes(points)
        return ~is_outside(votes, shown_by)

    def silhouette(self, camera: Camera) -> Tensor | None:
        """Return the pixels of a view where the object may be, (H, W) bool; None without a mask."""
        for hull_camera, distance in zip(self.cameras, self.distances, strict=True):
            if hull_camera.name == camera.name:
                is_inside = distance <= min(math.ceil(self.tolerance * _STEPS), 254)
                size = camera.shape
                resized = functional.interpolate(is_inside[None, None].float(), size)
                return resized[0, 0] > 0
        return None


def hull_of(cameras: Sequence[Camera], device: torch.device | str = "cpu") -> VisualHull | None:
    """Build the visual hull of the views with object masks; None without such masks."""
    masked = [camera for camera in cameras if camera.shows_object]
    if not masked:
        return None
    views = []
    distances = []
    for camera in masked:
        mask = torch.from_numpy(overview(camera) > 0)
        views.append(camera.resized(mask.shape[1], mask.shape[0]))
        distances.append(distance_outside(mask).to(device))
    side = max(view.longest_side for view in views)
    masks = [camera.image_mask for camera in masked]
    errors = [mask.outline_error for mask in masks if mask.weight > 0]
    error = max(errors, default=0.0)
    tolerance = max(float(TOLERANCE), OUTLINE_ERRORS * error * side)
    weights = tuple(mask.weight for mask in masks)
    return VisualHull(tuple(views), tuple(distances), tolerance, weights)
