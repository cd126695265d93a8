# SPDX-License-Identifier: Apache-2.0
"""Images: decoded at a size, undistorted, and cached.

Images stay 8-bit until the device needs them; the next one is decoded on a background thread.
"""

from __future__ import annotations

import contextlib
import functools
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, PngImagePlugin
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.data.cameras import Camera, ViewMask
from gaussian_splatting.data.color_spaces import srgb_of
from gaussian_splatting.data.mask_levels import (
    COUNTS,
    MaskLevels,
    brightness_of,
    counted,
    levels_of,
)
from sugar_utils.device import held_bytes, pinned
from sugar_utils.errors import UserError, reason_of, shortened
from sugar_utils.files import in_parallel, require_regular_file
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import available_bytes, trim_heap

if TYPE_CHECKING:
    import pycolmap

# Pillow refuses images of 179 megapixels and texts of 1 MiB, which are sound: phones take 200
# megapixels, textures of 16,384 pixels have 268, editors write their history into PNG files.
Image.MAX_IMAGE_PIXELS = 1 << 30
PngImagePlugin.MAX_TEXT_CHUNK = 1 << 26
PngImagePlugin.MAX_TEXT_MEMORY = 1 << 28

OUTLINE = (255, 0, 200)
IMAGE_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RuntimeError, struct.error, zlib.error, Image.DecompressionBombError),
)
"""Exceptions that Pillow and its plugins raise for damaged files."""

_HEAD_BYTES = 32
_OTHER_KINDS = (
    (
        (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftyphevc"),
        "it is HEIC: name it .heic",
    ),
    ((b"JXL ",), "it is JPEG XL: export it as JPEG"),
    ((b"<html", b"<!DOCTYPE"), "it is a web page: download the image again"),
    ((b"git-lfs",), "it is a pointer of Git LFS: run git lfs pull"),
)
"""First bytes of files that are no images that Pillow reads, and what to do with them."""

_KEPT_REASONS = 1 << 14
_COMPOSITED_AT_ONCE = 1 << 18  # pixels: few calls for a GPU, few bytes for the caches of a CPU
_TWO_FOCALS = {
    "SIMPLE_PINHOLE": ("PINHOLE", 4),
    "SIMPLE_RADIAL": ("OPENCV", 8),
    "RADIAL": ("OPENCV", 8),
    "SIMPLE_RADIAL_FISHEYE": ("OPENCV_FISHEYE", 8),
    "RADIAL_FISHEYE": ("OPENCV_FISHEYE", 8),
}
"""COLMAP's lens models with one focal length: the equal one with two, and how many parameters."""

_TRIM_BYTES = 1 << 28  # decoded between two trims: images that are dropped leave gaps in the heap
_FALLBACK_BUDGET = 2 << 30  # bytes, where the free memory is unknown


class UnreadableImage(UserError):
    """An image file that cannot be decoded; ``reason`` says why."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"cannot read the image {path}: {reason}; {advice}")
        self.reason = reason


def composited(photograph: Tensor, color: Tensor) -> Tensor:
    """Composite the object of an image on a plain background, in 8 bits. (H, W, 3) uint8

    Args:
        photograph: Colours and mask. (H, W, 4) uint8
        color: The background. (3,) uint8
    """
    result = torch.empty_like(photograph[..., :3])
    wide = color.to(torch.int32)
    rounded = 255 * wide + 127
    # Some rows at a time: wider numbers of the whole image would take four times its bytes.
    n_rows = max(1, _COMPOSITED_AT_ONCE // photograph.shape[1])
    for first in range(0, photograph.shape[0], n_rows):
        rows = photograph[first : first + n_rows]
        mixed = rows[..., :3] - wide
        mixed *= rows[..., 3:]
        mixed += rounded
        result[first : first + n_rows] = mixed.floor_divide_(255)
    return result


def dilated(mask: Tensor, pixels: int) -> Tensor:
    """Grow a mask by some pixels on each side, diagonals included. (H, W) bool -> (H, W) bool"""
    if pixels == 0:
        return mask
    grown = functional.max_pool2d(mask[None, None].float(), 2 * pixels + 1, 1, pixels)
    return grown[0, 0] > 0


def window_sums(planes: Tensor, radius: int, dim: int) -> Tensor:
    """Return sums over 2 radius + 1 pixels along a dimension, zero outside. (C, H, W)"""
    size = planes.shape[dim]
    pad = (0, 0, radius, radius) if dim == 1 else (radius, radius)
    padded = functional.pad(planes, pad)
    # A sum of slices takes a quarter of the time of pooling on the CPU, and has the same bits.
    total = padded.narrow(dim, 0, size).clone()
    for start in range(1, 2 * radius + 1):
        total += padded.narrow(dim, start, size)
    return total


def sampled_at(planes: Tensor, x: Tensor, y: Tensor, mode: str = "bilinear") -> Tensor:
    """Read images at positions in pixels; outside as at the border. (C, H, W) -> (C, h, w)

    Args:
        planes: The images.
        x: Columns; 0.5 is the middle of the first pixel. (h, w)
        y: Rows likewise. (h, w)
        mode: ``bilinear`` or ``bicubic``.
    """
    _, height, width = planes.shape
    # Shares of the picture from 0 to 1, which the sampler wants from -1 to 1.
    grid = torch.stack([x / width, y / height], dim=-1) * 2 - 1
    sampled = functional.grid_sample(
        planes[None], grid[None], mode=mode, padding_mode="border", align_corners=False
    )
    return sampled[0]


def eroded(mask: Tensor, pixels: int) -> Tensor:
    """Shrink a mask by some pixels on each side, but not at the border of the image. (H, W) bool"""
    return ~dilated(~mask, pixels)


def outlined(photograph: Tensor) -> Tensor:
    """Draw the outline of its mask into an image. (H, W, 3 or 4) -> (H, W, 3) uint8"""
    if photograph.shape[-1] == 3:
        return photograph
    counted = photograph[..., 3] >= COUNTS
    # A line that is still visible where the image is shown small.
    width = max(1, max(counted.shape) // 400)
    edge = dilated(counted, width) & ~counted
    color = torch.tensor(OUTLINE, dtype=torch.uint8, device=photograph.device)
    return torch.where(edge[..., None], color, photograph[..., :3])


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file in pixels."""
    with open_image(path) as image:
        return image.size


@contextlib.contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image file; errors while it is read become a ``UserError``."""
    require_regular_file(path, missing_ok=True)
    try:
        with Image.open(path) as image:
            yield image
    except MemoryError as error:
        raise UserError(
            f"cannot read the image {path}: not enough memory; close other programs, or make the "
            "image smaller"
        ) from error
    except IMAGE_ERRORS as error:
        raise UnreadableImage(path, reason_of(error), _advice(path, error)) from error


def unreadable_images(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the image files that cannot be decoded, with the reason of each.

    All are decoded, JPEG files at an eighth of their size; a file that has not changed only once.
    """
    paths = list(paths)
    reasons = in_parallel(_reason_unreadable, paths)
    return {path: reason for path, reason in zip(paths, reasons, strict=True) if reason}


def describe_unreadable(reasons: Mapping[str, str], n_images: int) -> str:
    """Return the line about images that are left out because they cannot be decoded.

    Args:
        reasons: By name.
        n_images: Of all images.
    """
    entries = [f"{name} ({reason})" for name, reason in reasons.items()]
    return (
        f"left out {len(entries)} of {n_images} photographs that cannot be read: "
        f"{shortened(entries, 5)}; copy them again to use them"
    )


def _reason_unreadable(path: Path) -> str:
    """Return why a file cannot be decoded; empty if it can."""
    status = require_regular_file(path).stat()
    return _reason_at(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=_KEPT_REASONS)
def _reason_at(path: Path, *state: int) -> str:
    try:
        with open_image(path) as image:
            image.draft(None, (1, 1))
            image.load()
    except UnreadableImage as error:
        return error.reason
    return ""


def _advice(path: Path, error: Exception) -> str:
    """Return how to fix an image that cannot be read; many are sound files of another kind."""
    if isinstance(error, OSError) and error.errno is not None:
        return "check the path and the permissions"
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        for marks, advice in _OTHER_KINDS:
            if any(mark in head for mark in marks):
                return advice
    return "replace the file"


def exif_of(image: Image.Image) -> Image.Exif:
    """Return the EXIF data of an image; empty where they are damaged, which its pixels are not."""
    with contextlib.suppress(*IMAGE_ERRORS):
        exif = image.getexif()
        for directory in (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo):
            exif.get_ifd(directory)
        return exif
    return Image.Exif()


def colors_of(image: Image.Image) -> Image.Image:
    """Convert an opened image to 8-bit sRGB, or RGBA if it has transparency.

    Modes, depths and colours of all kinds are converted, see :func:`srgb_of`.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64)
        # Floats are 0 to 1, integers have 16 bits.
        values = values * 255 if image.mode == "F" else values / 257
        image = Image.fromarray(rounded_bytes(values))
    mode = "RGBA" if has_alpha(image) else "RGB"
    converted = srgb_of(image)
    if converted is None:
        return image.convert(mode)
    if mode == "RGBA":
        converted.putalpha(image.convert(mode).getchannel("A"))
    return converted


def has_alpha(image: Image.Image) -> bool:
    """Whether an image has an alpha channel or a transparent colour."""
    return not {"A", "a"}.isdisjoint(image.getbands()) or "transparency" in image.info


def decode_image(path: Path, width: int, height: int, white_background: bool = False) -> np.ndarray:
    """Decode an image file at a given size. (height, width, 3) uint8

    Alpha is composited over black or white and truncated to 8 bits before the bicubic resize. The
    EXIF orientation is not applied, because COLMAP does not apply it either.
    """
    with open_image(path) as image:
        flat = colors_of(image)
        if flat.mode == "RGBA":
            rgba = np.asarray(flat).astype(np.uint32)
            rgb = rgba[..., :3]
            alpha = rgba[..., 3:]
            background = 255 * (255 - alpha) if white_background else 0
            flat = Image.fromarray(((rgb * alpha + background) // 255).astype(np.uint8))
        if flat.size != (width, height):
            flat = flat.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(flat)


def decode_mask(mask: ViewMask, width: int, height: int, upright: bool = False) -> np.ndarray:
    """Decode a mask; each pixel is the mean of those it covers. (height, width) uint8"""
    values, _ = read_mask(mask, upright)
    return resized_mask(values, width, height)


def read_mask(mask: ViewMask, upright: bool = False) -> tuple[np.ndarray, MaskLevels | None]:
    """Read a mask at the size of its file, (H, W) uint8, 255 counts, and the values of the file.

    An image's transparency needs no interpretation, so there are no levels of it.
    """
    with open_image(mask.path) as image:
        oriented = ImageOps.exif_transpose(image) if upright else image
        oriented.format = image.format
        alpha = _alpha_of(oriented)
        if mask.alpha:
            levels = None
            opaque = np.full(oriented.size[::-1], 255, np.uint8)
            values = opaque if alpha is None else alpha
        else:
            brightness = brightness_of(oriented)
            levels = levels_of(oriented, brightness)
            values = counted(brightness, levels, mask.white)
            if alpha is not None:
                values = (values.astype(np.uint16) * alpha // 255).astype(np.uint8)
    if mask.lens:
        height, width = values.shape
        values = undistorted(values, lens_of(mask.lens, width, height))
    return np.ascontiguousarray(values), levels


def _alpha_of(image: Image.Image) -> np.ndarray | None:
    """Return the transparency of an image, (H, W) uint8, 255 is opaque; None without any."""
    if not has_alpha(image):
        return None
    return np.asarray(image.convert("RGBA").getchannel("A"))


def resized_mask(values: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize a mask; each pixel is the mean of those it covers. (height, width) uint8"""
    flat = Image.fromarray(values)
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.BOX)
    return np.array(flat)


def decode_view(camera: Camera, white_background: bool = False) -> np.ndarray:
    """Decode the image of a camera at its size, with its mask. (H, W, 3) or (H, W, 4) uint8

    Colours of images that are masked by their transparency are not composited.
    """
    if camera.image_path is None:
        raise UserError(f"camera {camera.name} has no image; check the scene's image folder")
    path = camera.image_path
    width = camera.width
    height = camera.height
    mask = camera.mask
    if mask is None:
        return decode_image(path, width, height, white_background)
    values = decode_mask(mask, width, height)[..., None]
    has_white_background = white_background and not mask.alpha
    colors = decode_image(path, width, height, has_white_background)
    if mask.alpha:
        # Composited on black they were multiplied by alpha, which compositing does again.
        straight = colors.astype(np.uint16) * 255 // np.maximum(values, 1)
        colors = straight.clip(0, 255).astype(np.uint8)
    return np.concatenate([colors, values], axis=2)


def fit_to_file(camera: Camera) -> Camera:
    """Return the camera at the size of its image, which may have been scaled after calibration."""
    if camera.image_path is None:
        return camera
    width, height = image_size(camera.image_path)
    if (width, height) == camera.size:
        return camera
    # Each side of a scaled image is off by less than one pixel of the scaled size.
    if abs(width * camera.height - height * camera.width) > camera.width + camera.height:
        raise UserError(
            f"camera {camera.name} is {camera.width} x {camera.height} px, but its image "
            f"{camera.image_path} is {width} x {height} px, another aspect ratio; use the images "
            "that the cameras were computed from, not cropped and not rotated"
        )
    return camera.resized(width, height)


def require_aspect(path: Path, what: str, size: tuple[int, int], camera: Camera, help: str) -> None:
    """Check that a mask or a depth map has the aspect ratio of its image.

    Args:
        path: Its file, for the message of an error.
        what: Its kind, for the message.
        size: Its width and height in pixels.
        help: Advice for the message.
    """
    width, height = size
    image_width = camera.width
    image_height = camera.height
    if camera.source_path is not None:
        # The file may belong to the original of an undistorted copy, which has another size.
        image_width, image_height = image_size(camera.source_path)
    # Each side of a scaled image is off by less than one pixel of the scaled size.
    slack = max(image_width + image_height, width + height)
    if abs(width * image_height - height * image_width) > slack:
        raise UserError(
            f"{path}: the {what} is {width} x {height} px, its photograph {camera.name} "
            f"{image_width} x {image_height} px, another aspect ratio; {help}"
        )


class ImageStore(contextlib.AbstractContextManager):
    """Decoded training images under a byte budget, the least recently used are dropped first.

    One thread uses a store; decoding ahead happens on one background thread.

    Args:
        budget_bytes: Bytes of decoded images to keep; None allows a quarter of the free memory.
        sharers: Processes that share the free memory.
    """

    def __init__(
        self, white_background: bool = False, budget_bytes: int | None = None, sharers: int = 1
    ) -> None:
        self._white_background = white_background
        if budget_bytes is None:
            free_bytes = available_bytes()
            budget_bytes = _FALLBACK_BUDGET if free_bytes is None else free_bytes // (4 * sharers)
        self._budget = budget_bytes
        self._images: OrderedDict[tuple, Tensor] = OrderedDict()
        self._pending: dict[tuple, Future[Tensor]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="image-prefetch")
        self.n_bytes = 0  # of decoded images held now
        self._untrimmed = 0
        self._device: torch.device | None = None

    def serve(self, device: torch.device) -> None:
        """Decode for this device from now on, see :func:`~sugar_utils.device.pinned`."""
        self._device = device

    def get(self, camera: Camera) -> Tensor:
        """Return the image of a camera at its size, on the CPU; it is shared, do not write to it.

        (H, W, 3), or (H, W, 4) with a mask, uint8
        """
        key = _store_key(camera)
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        future = self._pending.pop(key, None)
        image = self._decode(camera) if future is None else future.result()
        self._keep(key, image)
        return image

    def scaled(self, camera: Camera, scale: float, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a smaller copy of an image, kept under the same budget as images.

        Args:
            make: Makes the copy from the image.
        """
        key = _store_key(camera, scale)
        original_key = _store_key(camera)
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        copy = make(self.get(camera))
        if original_key in self._images:
            # Drop it next: copies are asked for again, and are made from it only once.
            self._images.move_to_end(original_key, last=False)
        self._keep(key, copy)
        return copy

    def has_scaled(self, camera: Camera, scale: float) -> bool:
        """Whether a smaller copy is kept."""
        return _store_key(camera, scale) in self._images

    def drop_scaled(self, scale: float) -> None:
        """Drop all copies of a scale."""
        keys = [key for key in self._images if key[-1] == scale]
        for key in keys:
            self.n_bytes -= held_bytes(self._images.pop(key))

    def shown(self, camera: Camera) -> Tensor:
        """Return the image for figures and pictures: an object is on the plain background."""
        image = self.get(camera)
        if not camera.shows_object:
            return image
        shade = 255 if self._white_background else 0
        plain = torch.full((3,), shade, dtype=torch.uint8, device="cpu")
        return torch.cat([composited(image, plain), image[..., 3:]], dim=2)

    def prefetch(self, camera: Camera) -> None:
        """Start decoding the image of a camera; errors are raised when it is asked for."""
        key = _store_key(camera)
        if key in self._images or key in self._pending:
            return
        finished = [other for other, future in self._pending.items() if future.done()]
        for other in finished:
            future = self._pending.pop(other)
            # A failed prefetch is decoded again, and raises, when the image is requested.
            if future.exception() is None:
                self._keep(other, future.result())
        self._pending[key] = self._pool.submit(self._decode, camera)

    def _decode(self, camera: Camera) -> Tensor:
        image = torch.from_numpy(decode_view(camera, self._white_background))
        self._untrimmed += max(image.nbytes, _decoded_bytes(camera))
        if self._untrimmed >= _TRIM_BYTES:
            self._untrimmed = 0
            trim_heap()
        return pinned(image, self._device)

    def _keep(self, key: tuple, image: Tensor) -> None:
        n_bytes = held_bytes(image)
        if n_bytes > self._budget:
            return
        self._drop_to(self._budget - n_bytes)
        self._images[key] = image
        self.n_bytes += n_bytes

    def _drop_to(self, n_bytes: int) -> None:
        while self.n_bytes > n_bytes:
            self.n_bytes -= held_bytes(self._images.popitem(last=False)[1])

    def limit(self, budget_bytes: int) -> None:
        """Change the byte budget, and drop images until it is met."""
        self._budget = budget_bytes
        self._drop_to(budget_bytes)

    def close(self) -> None:
        """Stop decoding and drop all images."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._images.clear()
        self.n_bytes = 0

    def __exit__(self, *exception: object) -> None:
        self.close()


def _decoded_bytes(camera: Camera) -> int:
    """Bytes of the whole photograph of a view, which its decoder holds for a moment."""
    if camera.image_path is None:
        return 0
    width, height = image_size(camera.image_path)
    return 3 * width * height


def shared_or_own_store(
    shared: ImageStore | None, white_background: bool, sharers: int = 1
) -> contextlib.AbstractContextManager[ImageStore]:
    """Return a store for one stage: the shared one, which stays open, or one that is closed."""
    if shared is not None:
        return contextlib.nullcontext(shared)
    return ImageStore(white_background, sharers=sharers)


def _store_key(camera: Camera, scale: float = 1.0) -> tuple:
    return camera.image_path, camera.width, camera.height, camera.mask, scale


def lens_text(lens: pycolmap.Camera) -> str:
    """Return a pycolmap.Camera as text, see :func:`lens_of`."""
    return f"{lens.model_name} {lens.width} {lens.height} {list(lens.params)}"


def lens_of(text: str, width: int, height: int) -> pycolmap.Camera:
    """Return the pycolmap.Camera of a :func:`lens_text`, for images of another size."""
    model, stored_width, stored_height, params_text = text.split(" ", 3)
    # Lists of numpy's numbers name their type.
    numbers = re.findall(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?", params_text.replace("float64", ""))
    lens = load_pycolmap().Camera(
        model=model,
        width=int(stored_width),
        height=int(stored_height),
        params=[float(number) for number in numbers],
    )
    return _scaled_lens(lens, width, height)


def lens_at(lens: pycolmap.Camera, width: int, height: int) -> pycolmap.Camera | None:
    """Return a pycolmap.Camera for images of another size; None for another aspect ratio."""
    # Each side of a scaled picture is off by less than one pixel.
    if abs(width * lens.height - height * lens.width) > lens.width + lens.height:
        return None
    return _scaled_lens(lens, width, height)


def _scaled_lens(lens: pycolmap.Camera, width: int, height: int) -> pycolmap.Camera:
    """Return a pycolmap.Camera whose images were scaled to a size in whole pixels."""
    if (width, height) == (lens.width, lens.height):
        return lens
    pycolmap = load_pycolmap()
    scaled = pycolmap.Camera(lens.todict())
    if lens.model_name in _TWO_FOCALS and width * lens.height != height * lens.width:
        # Sides that were rounded scale by different factors, so there are two focal lengths.
        focal, *rest = lens.params
        model, n_params = _TWO_FOCALS[lens.model_name]
        params = [focal, focal, *rest]
        params += [0.0] * (n_params - len(params))
        scaled = pycolmap.Camera(model=model, width=lens.width, height=lens.height, params=params)
    scaled.rescale(width, height)
    return scaled


def undistorted_camera(lens: pycolmap.Camera) -> pycolmap.Camera:
    """Return the pycolmap.Camera of :func:`undistorted` images: a pinhole, with their size."""
    pycolmap = load_pycolmap()
    return pycolmap.undistort_camera(pycolmap.UndistortCameraOptions(), lens)


def undistorted(pixels: np.ndarray, lens: pycolmap.Camera) -> np.ndarray:
    """Undistort an image. (H, W) or (H, W, C) uint8"""
    pycolmap = load_pycolmap()
    if pixels.ndim == 3 and pixels.shape[2] == 4:
        # COLMAP has no images with four channels, so transparency is undistorted by itself.
        colors = undistorted(pixels[..., :3], lens)
        alpha = undistorted(pixels[..., 3], lens)
        return np.dstack([colors, alpha])
    bitmap = pycolmap.Bitmap.from_array(np.ascontiguousarray(pixels))
    options = pycolmap.UndistortCameraOptions()
    return pycolmap.undistort_image(options, bitmap, lens)[0].to_array()
