# SPDX-License-Identifier: Apache-2.0
"""Cameras that another program computed: found in a scene, and matched with its images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.core.subsets import values_by_key
from gaussian_splatting.data.images import lens_at
from gaussian_splatting.data.names import CamerasByName
from gaussian_splatting.data.world_offset import world_offset
from sugar_capture.camera_readers.entries import (
    NO_IMAGE,
    CameraFormat,
    KnownCamera,
    Size,
    SkippedCamera,
)
from sugar_capture.camera_readers.reader_table import FORMATS
from sugar_capture.camera_readers.reality_csv import lacking_columns
from sugar_capture.features.photographs import Photograph
from sugar_utils.errors import UserError, shortened

if TYPE_CHECKING:
    import pycolmap

MIN_MATCHED_CAMERAS = 3
_CAMERAS_OF_IMAGES = {
    "keyframes/corrected_images": "keyframes/corrected_cameras",
    "keyframes/images": "keyframes/cameras",
    "rgb": "metadata.json",
    "rgbd": "metadata",
}
"""Folders of images in raw data of Polycam and Record3D, and where their cameras are."""


@dataclass(frozen=True)
class CameraFiles:
    """The files of one set of cameras, with the format that reads them."""

    format: CameraFormat
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file, or the folder of a format with one file per image."""
        first = self.files[0]
        return first.parent if self.format.is_one_file_per_image else first

    @property
    def name(self) -> str:
        """Program and path, for messages."""
        return f"{self.format.program}: {self.path}"


@dataclass(frozen=True)
class KnownCameras:
    """The cameras of another program, matched with the images of a scene."""

    source: CameraFiles
    photographs: list[Photograph]  # those that have a camera
    cameras: list[KnownCamera]  # of each photograph
    # Offset that was subtracted from all positions; adding it restores the other program's
    # coordinates. None: nothing was subtracted.
    offset: list[float] | None
    notes: tuple[str, ...] = ()  # a line for each reason for which cameras were left out

    def lens_groups(self) -> list[tuple[Any, list[int]]]:
        """Return each lens with the indices of the photographs that it took."""
        lenses: dict[str, Any] = {}
        indices: dict[str, list[int]] = {}
        for index, camera in enumerate(self.cameras):
            key = repr(camera.lens.todict())
            lenses.setdefault(key, camera.lens)
            indices.setdefault(key, []).append(index)
        return [(lenses[key], indices[key]) for key in lenses]


def capture_folders(root: Path) -> list[str]:
    """Return the folders in which Polycam and Record3D keep the images of a scene folder."""
    return [
        images
        for images, cameras in _CAMERAS_OF_IMAGES.items()
        if _is_file_or_folder(root / cameras)
    ]


def _is_file_or_folder(path: Path) -> bool:
    return path.is_dir() or path.is_file()


def find_cameras(named: str | None, *folders: Path) -> list[CameraFiles]:
    """Find all sets of cameras in folders, or at the path that ``--cameras`` names.

    Args:
        named: The flag ``--cameras``: a file, a folder, ``none``, or None to search ``folders``.

    Raises:
        UserError: The named path has no cameras.
    """
    if named == "none":
        return []
    if not named:
        return _search_folders(folders)
    path = Path(named)
    if path.is_dir():
        sources = _search_folders([path])
    elif path.is_file():
        sources = _recognise_file(path)
    else:
        sources = []
    if sources:
        return sources
    if path.suffix.lower() == ".csv" and path.is_file():
        columns = ", ".join(lacking_columns(path))
        raise UserError(f"--cameras {named}: the table has no columns {columns}; export it again")
    programs = ", ".join(dict.fromkeys(camera_format.program for camera_format in FORMATS))
    raise UserError(f"--cameras {named}: has no cameras of {programs}; check the path")


def _search_folders(folders: Iterable[Path]) -> list[CameraFiles]:
    """Find the sets of cameras in folders, each set once."""
    sources: dict[tuple[Path, ...], CameraFiles] = {}
    for folder in folders:
        for camera_format in FORMATS:
            files = [f for f in _candidates(folder, camera_format) if camera_format.accepts(f)]
            sets = [(file,) for file in files]
            if camera_format.is_one_file_per_image and files:
                sets = [tuple(files)]
            for members in sets:
                sources.setdefault(members, CameraFiles(camera_format, members))
    return list(sources.values())


def _candidates(folder: Path, camera_format: CameraFormat) -> list[Path]:
    """Return the files of the first pattern that matches any."""
    for pattern in camera_format.patterns:
        files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
        if files:
            return files
    return []


def _recognise_file(path: Path) -> list[CameraFiles]:
    for camera_format in FORMATS:
        if not camera_format.is_one_file_per_image and camera_format.accepts(path):
            return [CameraFiles(camera_format, (path,))]
    return []


def the_cameras(named: str | None, *folders: Path) -> CameraFiles | None:
    """Return the only set of cameras; None if there is none.

    Args:
        named: See :func:`find_cameras`.

    Raises:
        UserError: There are several.
    """
    sources = find_cameras(named, *folders)
    if len(sources) > 1:
        paths = shortened([str(source.path) for source in sources])
        raise UserError(
            f"{len(sources)} sets of cameras ({paths}); name one with --cameras, or none"
        )
    return sources[0] if sources else None


def read_cameras(source: CameraFiles, photographs: Sequence[Photograph]) -> KnownCameras:
    """Read cameras and match them with photographs; photographs without a camera are left out.

    Raises:
        UserError: Cameras and photographs do not belong together.
    """
    find = CamerasByName(photographs)

    def size_of(name: str) -> Size | None:
        photograph = find(name)
        return None if photograph is None else (photograph.width, photograph.height)

    entries = list(source.format.read(source.files, size_of))
    cameras = [entry for entry in entries if isinstance(entry, KnownCamera)]
    skipped = [entry for entry in entries if isinstance(entry, SkippedCamera)]
    matched: dict[str, KnownCamera] = {}
    for camera in cameras:
        photograph = find(camera.name)
        if photograph is None:
            skipped.append(SkippedCamera(camera.name, NO_IMAGE))
            continue
        if photograph.name in matched:
            raise UserError(f"{source.path}: has several cameras of the image {photograph.name}")
        lens = _scaled_lens(camera, photograph, source.path)
        matched[photograph.name] = replace(camera, lens=lens)
    notes = _describe_skipped(skipped, find, len(entries))
    if len(matched) < MIN_MATCHED_CAMERAS:
        raise _too_few_matches(source.path, len(matched), cameras, notes)
    registered = [photograph for photograph in photographs if photograph.name in matched]
    _refuse_half_turns(registered, source)
    offset = world_offset(np.stack([camera.center for camera in matched.values()]))
    moved = []
    for photograph in registered:
        camera = matched[photograph.name]
        moved.append(replace(camera, center=camera.center - offset))
    subtracted = offset.tolist() if offset.any() else None
    return KnownCameras(source, registered, moved, subtracted, tuple(notes))


def _too_few_matches(
    path: Path, n_matched: int, cameras: Sequence[KnownCamera], notes: Sequence[str]
) -> UserError:
    names = f" ({shortened([camera.name for camera in cameras])})" if cameras else ""
    reasons = f" ({'; '.join(notes)})" if notes else ""
    return UserError(
        f"{path}: {n_matched} of its {len(cameras)} cameras{names} have an image here, at "
        f"least {MIN_MATCHED_CAMERAS} are needed{reasons}; check the names, or pass --cameras none"
    )


def _describe_skipped(
    skipped: Sequence[SkippedCamera], find: CamerasByName[Photograph], n_cameras: int
) -> list[str]:
    """Count the skipped cameras for each reason, and propose an image for a missing one."""
    names = values_by_key((camera.reason, camera.name) for camera in skipped)
    notes = []
    for reason, group in names.items():
        note = f"{len(group)} of {n_cameras} cameras are {reason}: {shortened(group)}"
        if reason == NO_IMAGE:
            nearest = find.nearest(group[0])
            if nearest:
                note += f" (nearest to {group[0]} is {nearest})"
        notes.append(note)
    return notes


def _refuse_half_turns(photographs: Sequence[Photograph], source: CameraFiles) -> None:
    """Refuse images that EXIF turns upside down, unless it is clear that the program did, too.

    Sizes of images that EXIF turns on their side fit only if the program turned them. A half turn
    keeps the size, so it shows nothing.
    """
    unclear = [photograph for photograph in photographs if photograph.keeps_size]
    on_their_side = [p for p in photographs if p.turned and not p.keeps_size]
    if not unclear or any(p.width != p.height for p in on_their_side):
        return
    names = shortened([photograph.name for photograph in unclear])
    raise UserError(
        f"{source.path}: EXIF data turn {len(unclear)} photographs by 180 degrees ({names}), and "
        f"nothing tells whether {source.format.program} did; if not, remove the orientation tag, "
        "else save them turned, without it"
    )


def _scaled_lens(camera: KnownCamera, photograph: Photograph, path: Path) -> pycolmap.Camera:
    """Return the lens at the size of the photograph, which may have been scaled."""
    lens = camera.lens
    width = photograph.width
    height = photograph.height
    scaled = lens_at(lens, width, height)
    if scaled is None:
        turned = " when turned as its EXIF data say" if photograph.turned else ""
        raise UserError(
            f"{path}, camera {camera.name}: is {lens.width} x {lens.height} px, but "
            f"{photograph.path} is {width} x {height} px{turned}; use the images that the cameras "
            "were computed from, without EXIF rotation"
        )
    return scaled
