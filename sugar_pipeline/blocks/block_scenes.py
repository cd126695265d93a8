# SPDX-License-Identifier: Apache-2.0
"""The scene folder of a block: parts of the photographs, masks, cameras and points.

A block is trained like any capture. Of each photograph that shows it, it gets the rectangle around
the pixels that show it, as a camera with a shifted principal point, and a mask in which the other
pixels of the rectangle say nothing: what stands before the block or behind it needs no
Gaussians and takes no memory. The overview locates pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap_writing import write_capture
from gaussian_splatting.data.images import COUNTS, decode_view
from gaussian_splatting.data.world_offset import write_offset
from sugar_pipeline.blocks.partition import Partition
from sugar_pipeline.blocks.tracks import CapturePoints
from sugar_utils.errors import UserError, explained
from sugar_utils.files import atomic_path

MIN_VIEW_SHARE = 0.02  # of the pixels of a photograph that have to show a block
DILATION = 2  # small pixels by which the pixels that count are grown
ROOM = 0.1  # of the sides of the rectangle that is added on all sides, for what lies behind
PADDING = 8  # pixels of it, at least
QUALITY = 96  # of the JPEG files: 4:4:4, so that their error is far below that of any model
_ADVICE = "free some space or choose another --output_dir"


@dataclass(frozen=True)
class CutOut:
    """The rectangle of a photograph that shows a block."""

    camera: Camera  # of the whole photograph
    left: int
    top: int
    right: int  # first column after it
    bottom: int  # first row after it
    share: float  # of the pixels of the photograph that show the block
    # Small pixels of the photograph that show it, (h, w) bool; None once the mask is written.
    counts: np.ndarray | None

    @property
    def name(self) -> str:
        """Name of the file in the block's folder of images."""
        path = PurePosixPath(self.camera.name)
        is_jpeg = path.suffix.lower() in (".jpg", ".jpeg")
        return str(path if is_jpeg else path.with_name(f"{path.name}.jpg"))

    def cut_camera(self) -> Camera:
        """The camera that took this rectangle."""
        camera = self.camera
        return replace(
            camera,
            name=self.name,
            width=self.right - self.left,
            height=self.bottom - self.top,
            cx=camera.cx - self.left,
            cy=camera.cy - self.top,
        )


def cut_out(
    camera: Camera, positions: np.ndarray, partition: Partition, number: int
) -> CutOut | None:
    """Return the rectangle of a photograph that shows a block; None where too few pixels do.

    In the rectangle, pixels count that show the block, or nothing: where the sky is seen through a
    block, it has to be empty.

    Args:
        camera: At the size of the training.
        positions: That the pixels of the small view show. (h, w, 3) world units, NaN where unknown
        partition: Of space into blocks.
        number: Of the block.
    """
    is_near = partition.bounds.contains(positions)
    is_shown = is_near & partition.boxes[number].contains(positions, partition.margin)
    share = float(is_shown.mean())
    if share < MIN_VIEW_SHARE:
        return None
    # Here and not above: most commands start without it.
    from scipy.ndimage import binary_dilation

    shows = np.asarray(binary_dilation(is_shown, iterations=DILATION))
    height, width = positions.shape[:2]
    top, bottom = _grown(np.flatnonzero(shows.any(axis=1)), camera.height / height)
    left, right = _grown(np.flatnonzero(shows.any(axis=0)), camera.width / width)
    return CutOut(
        camera=camera,
        left=max(0, left),
        top=max(0, top),
        right=min(camera.width, right),
        bottom=min(camera.height, bottom),
        share=share,
        counts=shows | ~is_near,
    )


def _grown(lines: np.ndarray, scale: float) -> tuple[int, int]:
    """Return the first pixel of a range of small pixels, and that after the last, with room.

    Args:
        lines: Rows or columns of small pixels, ascending. (n,)
        scale: Pixels along a side of a small one.
    """
    first = int(lines[0] * scale)
    end = int((lines[-1] + 1) * scale)
    room = max(PADDING, int(ROOM * (end - first)))
    return first - room, end + room


def write_cut_out(folder: Path, cut: CutOut, photograph: np.ndarray) -> None:
    """Write the rectangle of a photograph and its mask into the scene folder of a block.

    Args:
        photograph: The whole one, (H, W, 3), or (H, W, 4) with its own mask, uint8.
    """
    rows = slice(cut.top, cut.bottom)
    columns = slice(cut.left, cut.right)
    height, width = photograph.shape[:2]
    if cut.counts is None:
        raise ValueError(f"{cut.name}: the mask is written already")
    small = Image.fromarray(np.where(cut.counts, 255, 0).astype(np.uint8))
    counts = np.asarray(small.resize((width, height), Image.Resampling.NEAREST)) > 0
    if photograph.shape[2] == 4:
        counts = counts & (photograph[..., 3] >= COUNTS)
    mask = np.where(counts[rows, columns], 255, 0).astype(np.uint8)
    colors = Image.fromarray(np.ascontiguousarray(photograph[rows, columns, :3]))
    image_path = folder / "images" / cut.name
    mask_path = folder / "masks" / f"{cut.name}.png"
    with explained(f"cannot write {folder}:", _ADVICE):
        for path in (image_path, mask_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(image_path) as temporary:
            colors.save(temporary, format="JPEG", quality=QUALITY, subsampling=0)
        with atomic_path(mask_path) as temporary:
            Image.fromarray(mask).save(temporary, format="PNG", compress_level=1)


def write_photograph(folders: Sequence[tuple[Path, CutOut]], camera: Camera, white: bool) -> None:
    """Decode a photograph once and write its rectangles into the scene folders of blocks."""
    photograph = decode_view(camera, white)
    for folder, cut in folders:
        write_cut_out(folder, cut, photograph)


def write_block_model(
    folder: Path,
    cuts: Sequence[CutOut],
    points: CapturePoints,
    is_inside: np.ndarray,
    offset: np.ndarray,
) -> None:
    """Write cameras and points of a block as a COLMAP model.

    Args:
        is_inside: The points that lie in the block or its margin. (P,) bool
        offset: Of the whole capture. (3,)

    Raises:
        UserError: The block has no points.
    """
    if not is_inside.any():
        raise UserError(
            f"{folder.parent.name} has no points of the reconstruction; use fewer --blocks"
        )
    cameras = {cut.camera.name: cut.cut_camera() for cut in cuts}
    tracked = points.within(is_inside, cameras)
    write_capture(folder / "sparse" / "0", list(cameras.values()), tracked)
    write_offset(folder, offset)
