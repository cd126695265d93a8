# SPDX-License-Identifier: Apache-2.0
"""Finding the masks of a capture's photographs, under the names that programs give them, and
checking them before anything is written.

| who | where |
|---|---|
| COLMAP | ``masks/NAME.EXT.png`` |
| Brush and many apps | ``masks/STEM.*`` |
| others | ``masks/STEM_mask.*``, ``STEM-mask.*``, ``STEM.mask.*``, ``NAME.EXT.mask.*`` |
| 2DGS, PGSR, GOF, DTU data | ``mask/000.png``, by the photographs' numbers or order |
| nerfstudio | ``mask_path`` of each frame in ``transforms.json`` |
| NeRF-synthetic, cut-outs | alpha channel of the photograph |

In all of them black is what does not count; see :mod:`~gaussian_splatting.data.mask_levels`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np
import torch
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
from sugar_utils.files import in_parallel
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
"""What names of masks may have behind the photograph's name, with its extension or without."""

_KEPT_OVERVIEWS = 4096
_MEANING = {
    "object": "the background is ignored (--mask_mode object)",
    "ignore": "what is black in them is ignored (--mask_mode ignore)",
}
_flag = partial(flag, group="masks")

_Found = tuple[str, list["ViewMask | None"]]
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
        "object: what is masked is wanted alone, around it there is nothing; ignore: "
        "what is black in the masks says nothing, such as people and tripods",
        choices=get_args(MaskMode),
        no_effect_when="without masks",
    )


NO_MASKS = MaskOptions(masks=NONE)


def with_masks(
    cameras: Sequence[Camera], root: Path, options: MaskOptions, notify: Notify
) -> list[Camera]:
    found = _find(cameras, root, options)
    if found is None:
        return list(cameras)
    place, masks = found
    if not any(masks):
        advice = f"{place}: no mask belongs to a photograph; name them as {cameras[0].name}"
        if options.masks is not None:
            raise UserError(f"{advice}.png, or number them, or pass --masks none")
        notify(f"note: {advice}.png to use them; going on without masks")
        return list(cameras)
    masked = [replace(c, mask=mask) for c, mask in zip(cameras, masks, strict=True)]
    in_parallel(_check, masked)
    masked = _with_white(masked, notify)
    empty = [camera for camera in masked if counts_nowhere(camera)]
    if len(empty) > MAX_BLACK_SHARE * len(masked):
        mask = empty[0].mask
        reason = "the mask is all black"
        if _file_overview(empty[0]).values.any():
            reason = f"no pixel of the mask is at least {images.COUNTS} of 255"
        raise UserError(
            f"{mask.path}: {reason}, so nothing of {empty[0].name} would count; remove the mask, "
            "or the photograph"
        )
    missing = [camera.name for camera in masked if camera.mask is None]
    n = len(masked) - len(missing)
    of = len(masked)
    notify(f"masks of {n} of {of} photographs: {place}; {_MEANING[options.mask_mode]}")
    if missing:
        told = f"{len(missing)} of {of} photographs have no mask and count whole"
        notify(f"note: {told} ({shortened(missing)})")
    return masked


def _with_white(cameras: Sequence[Camera], notify: Notify) -> list[Camera]:
    """The cameras with masks that know which brightness is white in those of the capture."""
    masked = [camera for camera in cameras if camera.mask is not None and not camera.mask.alpha]
    levels = [(camera.mask.path.name, _file_overview(camera).levels) for camera in masked]
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
    """Whether a view has a mask of which no pixel counts."""
    return camera.mask is not None and not _file_overview(camera).counts_somewhere


def require_counted_pixels(cameras: Sequence[Camera]) -> None:
    """Raise a ``UserError`` if no pixel of any view counts at the size of the cameras."""
    if all(_is_empty(camera) for camera in cameras):
        first = cameras[0]
        raise UserError(
            f"{first.mask.path}: at {first.width} x {first.height} px no pixel of any training "
            "view counts in the masks; use larger images or other masks, or --masks none"
        )


def _is_empty(camera: Camera) -> bool:
    if camera.mask is None or (overview(camera) >= images.COUNTS).any():
        return False
    # What is thin is lost in a small mask only.
    values = images.decode_mask(camera.mask, camera.width, camera.height)
    return not (values >= images.COUNTS).any()


@dataclass(frozen=True, eq=False)
class _Overview:
    """A mask file, seen small."""

    values: np.ndarray  # above 0 where any of it counts, (H, W) uint8
    levels: MaskLevels | None  # values of the file; None of a photograph's transparency
    counts_somewhere: bool  # at the size of the file


def overview(camera: Camera) -> np.ndarray:
    """The mask of a camera, ``OVERVIEW_SIDE`` long; above 0 where any of it counts. (H, W) uint8"""
    return _file_overview(camera).values


def _file_overview(camera: Camera) -> _Overview:
    small = camera.reduced(OVERVIEW_SIDE)
    status = camera.mask.path.stat()
    return _overview(camera.mask, small.width, small.height, (status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=_KEPT_OVERVIEWS)
def _overview(mask: ViewMask, width: int, height: int, version: Any) -> _Overview:
    """Kept, because every stage of a pipeline looks at the same masks; ``version`` of the file."""
    file_values, levels = images.read_mask(mask)
    values = images.resized_mask(file_values, width, height)
    values.setflags(write=False)
    return _Overview(values, levels, bool((file_values >= images.COUNTS).any()))


def object_mask_path(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return folder.joinpath(*(part for part in parts if part not in ("/", ".."))).with_name(
        f"{PurePosixPath(parts[-1]).name}.png"
    )


def with_object_masks(cameras: Sequence[Camera], folder: Path) -> list[Camera]:
    """The cameras with the estimated masks that a folder holds in place of their own."""
    paths = [object_mask_path(folder, camera.name) for camera in cameras]
    return [
        replace(c, mask=ViewMask(path, "object")) if path.is_file() else c
        for c, path in zip(cameras, paths, strict=True)
    ]


def _find(cameras: Sequence[Camera], root: Path, options: MaskOptions) -> _Found | None:
    asked = options.masks
    mode = options.mask_mode
    if asked in (NONE, *FOUND):
        return None
    if asked == ALPHA:
        paths = [camera.image_path for camera in cameras]
        masks = [ViewMask(p, mode, alpha=True) if _is_transparent(p) else None for p in paths]
        if not any(masks):
            raise UserError(
                f"--masks alpha: no photograph of {root} has an alpha channel; make masks"
            )
        return "alpha channels", masks
    if asked is not None:
        folder = next((p for p in (root / asked, Path(asked)) if p.is_dir()), None)
        if folder is None:
            raise UserError(f"--masks {asked}: no such folder, in {root} or by itself")
        return _in_folder(cameras, folder, mode)
    named = [camera.mask_path for camera in cameras]
    if any(named):
        place = f"named by transforms*.json of {root}"
        return place, [_of_file(c, path, mode) for c, path in zip(cameras, named, strict=True)]
    for name in FOLDERS:
        if (root / name).is_dir():
            return _in_folder(cameras, root / name, mode)
    return None


def _is_transparent(path: Path | None) -> bool:
    if path is None:
        return False
    with images.open_image(path) as image:
        return images.has_alpha(image)


def _of_file(camera: Camera, path: Path | None, mode: MaskMode) -> ViewMask | None:
    # A photograph that was freed of its lens's distortion has a mask that was not.
    return None if path is None else ViewMask(path, mode, lens=camera.lens)


def _in_folder(cameras: Sequence[Camera], folder: Path, mode: MaskMode) -> _Found:
    by_name = ImageFolder(folder)
    names = [PurePosixPath(camera.name.replace("\\", "/")) for camera in cameras]
    alike = Counter(name.name for name in names)

    def find(name: PurePosixPath) -> Path | None:
        places = [name, PurePosixPath(name.name)] if alike[name.name] == 1 else [name]
        bases = [base for place in places for base in (place, place.with_suffix(""))]
        wanted = [*map(str, places), *(f"{base}{end}" for end in _ENDINGS for base in bases)]
        return next(filter(None, map(by_name.find, wanted)), None)

    paths = [find(name) for name in names]
    # A mask that several photographs of one name lead to belongs to none of them.
    times = Counter(path for path, name in zip(paths, names, strict=True) if alike[name.name] > 1)
    paths = [None if times[path] > 1 else path for path in paths]
    if not all(paths):
        paths = _by_number(cameras, folder) or paths
    return str(folder), [_of_file(c, path, mode) for c, path in zip(cameras, paths, strict=True)]


def _by_number(cameras: Sequence[Camera], folder: Path) -> list[Path | None] | None:
    """Masks that are named by numbers alone, as DTU's are; None where there are others."""
    masks = _images_in(folder)
    photographs = [camera.source_path or camera.image_path for camera in cameras]
    if not masks or None in photographs or not all(path.stem.isdecimal() for path in masks):
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
    found = (p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    visible = (path for path in found if not path.name.startswith("."))
    return sorted(visible, key=lambda path: natural_order(path.name))


def _check(camera: Camera) -> None:
    mask = camera.mask
    if mask is None:
        return
    if not mask.alpha:
        advice = "make masks of the photographs as they are, or switch them off with --masks none"
        images.require_aspect(mask.path, "mask", images.image_size(mask.path), camera, advice)
    overview(camera)


def is_outside(votes: Tensor, shown_by: Tensor) -> Tensor:
    """Whether so many votes are enough. (N,), (N,) -> (N,) bool"""
    needed = (FEW_VIEWS_SHARE * shown_by).clamp_max(MIN_VOTES)
    needed = torch.maximum(VOTES_SHARE * shown_by, needed)
    return (votes >= needed) & (votes > 0)


def distance_outside(mask: Tensor) -> Tensor:
    """Distance of each pixel from a mask, (H, W) bool, in quarters of a pixel. (H, W) uint8"""
    # Here and not above: it takes a tenth of the time in which a command starts.
    from scipy.ndimage import distance_transform_edt

    if not bool(mask.any()):
        return torch.full(mask.shape, 255, dtype=torch.uint8, device=mask.device)
    found = distance_transform_edt(~mask.cpu().numpy()) * _STEPS
    return torch.from_numpy(np.minimum(np.rint(found), 255).astype(np.uint8)).to(mask.device)


@dataclass(frozen=True, eq=False)
class VisualHull:
    cameras: tuple[Camera, ...]
    # Distances from the masks, as of :func:`distance_outside`, (H, W) uint8 each.
    distances: tuple[Tensor, ...]
    tolerance: float = float(TOLERANCE)
    weights: tuple[float, ...] | None = None  # of the views; None for 1

    def votes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Votes of the views that points, (N, 3), lie outside of the object.

        A vote grows from 0 at the tolerance to the weight of the view at twice that distance, at
        least one pixel later. A view that does not show a point has no vote. Returns the sums of
        the votes, and of the weights of the views that show a point. (N,), (N,) float32
        """
        votes = torch.zeros(points.shape[0], dtype=torch.float32, device=points.device)
        shown_by = torch.zeros_like(votes)
        x, y, z = points.detach().float().unbind(-1)
        weights = self.weights or [1.0] * len(self.cameras)
        for c, distance, weight in zip(self.cameras, self.distances, weights, strict=True):
            # Sums of three products, not a matrix product, whose order depends on the machine.
            u, v, depth = (
                x * float(row[0]) + y * float(row[1]) + z * float(row[2]) + float(offset)
                for row, offset in zip(c.rotation, c.translation, strict=True)
            )
            u = c.fx * u / depth + c.cx
            v = c.fy * v / depth + c.cy
            shown = (depth > _MIN_Z) & (u >= 0) & (v >= 0) & (u < c.width) & (v < c.height)
            rows, columns = (torch.where(shown, value, 0).long() for value in (v, u))
            beyond = distance[rows, columns].float() / _STEPS - self.tolerance
            votes += (beyond / max(self.tolerance, 1.0)).clamp(0, 1) * shown * weight
            shown_by += shown * weight
        return votes, shown_by

    def contains(self, points: Tensor) -> Tensor:
        """Points that too few masks exclude. (N, 3) -> (N,) bool"""
        return ~is_outside(*self.votes(points))

    def silhouette(self, camera: Camera) -> Tensor | None:
        """Pixels of a view where the object may be. (H, W) bool; None without a mask"""
        for own, distance in zip(self.cameras, self.distances, strict=True):
            if own.name == camera.name:
                inside = distance <= min(math.ceil(self.tolerance * _STEPS), 254)
                size = (camera.height, camera.width)
                return functional.interpolate(inside[None, None].float(), size)[0, 0] > 0
        return None


def hull_of(cameras: Sequence[Camera], device: torch.device | str = "cpu") -> VisualHull | None:
    """The hull of the views whose masks show an object; None where there is none."""
    seen = [camera for camera in cameras if camera.shows_object]
    if not seen:
        return None
    views = []
    distances = []
    for camera in seen:
        mask = torch.from_numpy(overview(camera) > 0)
        views.append(camera.resized(mask.shape[1], mask.shape[0]))
        distances.append(distance_outside(mask).to(device))
    side = max(max(view.width, view.height) for view in views)
    error = max((c.mask.outline_error for c in seen if c.mask.weight > 0), default=0.0)
    tolerance = max(float(TOLERANCE), OUTLINE_ERRORS * error * side)
    weights = tuple(camera.mask.weight for camera in seen)
    return VisualHull(tuple(views), tuple(distances), tolerance, weights)
