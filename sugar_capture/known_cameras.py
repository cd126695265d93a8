# SPDX-License-Identifier: Apache-2.0
"""Cameras that another program found: looked for, and matched with the photographs of a scene."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.data.images import lens_at
from gaussian_splatting.data.names import CamerasByName
from gaussian_splatting.data.world_offset import world_offset
from sugar_capture.camera_formats import (
    FORMATS,
    NO_IMAGE,
    Format,
    KnownCamera,
    SkippedCamera,
    lacking_columns,
)
from sugar_capture.photographs import Photograph
from sugar_utils.errors import UserError, shortened

FEWEST = 3
_CAPTURES = {
    "keyframes/corrected_images": "keyframes/corrected_cameras",
    "keyframes/images": "keyframes/cameras",
    "rgb": "metadata.json",
}


@dataclass(frozen=True)
class CameraFiles:
    """What one program wrote."""

    kind: Format
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.files[0].parent if self.kind.many else self.files[0]

    @property
    def name(self) -> str:
        return f"{self.kind.program}: {self.path}"


@dataclass(frozen=True)
class KnownCameras:
    source: CameraFiles
    photographs: list[Photograph]
    cameras: list[KnownCamera]  # of each photograph
    # What was subtracted from all places, to be added for the coordinates of the other program.
    offset: list[float] | None
    notes: tuple[str, ...] = ()  # a line for each reason for which cameras were left out

    def lens_groups(self) -> list[tuple[Any, list[int]]]:
        """Lenses, and the indices of the photographs that each took."""
        groups: dict[str, tuple[Any, list[int]]] = {}
        for index, camera in enumerate(self.cameras):
            groups.setdefault(repr(camera.lens.todict()), (camera.lens, []))[1].append(index)
        return list(groups.values())


def capture_folders(root: Path) -> list[str]:
    """Where Polycam and Record3D keep the images of a scene folder."""
    places = ((images, root / cameras) for images, cameras in _CAPTURES.items())
    return [images for images, cameras in places if cameras.is_dir() or cameras.is_file()]


def find_cameras(asked: str | None, *folders: Path) -> list[CameraFiles]:
    """All sets of cameras in the folders, or of the path that ``--cameras`` names."""
    if asked == "none":
        return []
    path = Path(asked or "")
    found = {}
    if asked and path.is_file():
        fits = [kind for kind in FORMATS if not kind.many and kind.accepts(path)]
        found = {(path,): CameraFiles(fits[0], (path,))} if fits else {}
    for folder in ([path] if path.is_dir() else []) if asked else folders:
        for kind in FORMATS:
            places = ([f for f in sorted(folder.glob(p)) if f.is_file()] for p in kind.places)
            files = [file for file in next(filter(None, places), []) if kind.accepts(file)]
            for own in [tuple(files)] if kind.many and files else [(file,) for file in files]:
                found.setdefault(own, CameraFiles(kind, own))
    if asked and not found and path.suffix.lower() == ".csv" and path.is_file():
        columns = ", ".join(lacking_columns(path))
        raise UserError(f"--cameras {asked}: the table has no columns {columns}; export it again")
    if asked and not found:
        programs = ", ".join(dict.fromkeys(kind.program for kind in FORMATS))
        raise UserError(f"--cameras {asked}: has no cameras of {programs}; check the path")
    return list(found.values())


def the_cameras(asked: str | None, *folders: Path) -> CameraFiles | None:
    """The only set of cameras; None if there is none."""
    found = find_cameras(asked, *folders)
    if len(found) > 1:
        paths = shortened([str(source.path) for source in found])
        raise UserError(f"{len(found)} sets of cameras ({paths}); name one with --cameras, or none")
    return found[0] if found else None


def read_cameras(source: CameraFiles, photographs: Sequence[Photograph]) -> KnownCameras:
    """Read cameras and match them with photographs; those without a camera are left out."""
    find = CamerasByName(photographs)
    path = source.path

    def size_of(name: str) -> tuple[int, int] | None:
        photograph = find(name)
        return None if photograph is None else (photograph.width, photograph.height)

    entries = list(source.kind.read(source.files, size_of))
    cameras = [entry for entry in entries if isinstance(entry, KnownCamera)]
    skipped = [entry for entry in entries if isinstance(entry, SkippedCamera)]
    matched: dict[str, KnownCamera] = {}
    for camera in cameras:
        photograph = find(camera.name)
        if photograph is not None:
            if photograph.name in matched:
                raise UserError(f"{path}: has several cameras of the image {photograph.name}")
            matched[photograph.name] = replace(camera, lens=_fitted(camera, photograph, path))
        else:
            skipped.append(SkippedCamera(camera.name, NO_IMAGE))
    notes = _notes_of(skipped, find, len(entries))
    if len(matched) < FEWEST:
        names = f" ({shortened([camera.name for camera in cameras])})" if cameras else ""
        reasons = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(
            f"{path}: {len(matched)} of its {len(cameras)} cameras{names} have an image here, at "
            f"least {FEWEST} are needed{reasons}; check the names, or pass --cameras none"
        )
    chosen = [p for p in photographs if p.name in matched]
    _refuse_half_turns(chosen, source)
    offset = world_offset(np.stack([camera.center for camera in matched.values()]))
    moved = [replace(matched[p.name], center=matched[p.name].center - offset) for p in chosen]
    shift = offset.tolist() if offset.any() else None
    return KnownCameras(source, chosen, moved, shift, tuple(notes))


def _notes_of(
    skipped: Sequence[SkippedCamera], find: CamerasByName[Photograph], n_cameras: int
) -> list[str]:
    """Tell for each reason how many cameras were skipped, and what comes near a missing image."""
    names: dict[str, list[str]] = {}
    for camera in skipped:
        names.setdefault(camera.reason, []).append(camera.name)
    notes = [
        f"{len(group)} of {n_cameras} cameras are {reason}: {shortened(group)}"
        for reason, group in names.items()
    ]
    if NO_IMAGE in names:
        name = names[NO_IMAGE][0]
        nearest = find.nearest(name)
        index = list(names).index(NO_IMAGE)
        notes[index] += f" (nearest to {name} is {nearest})" if nearest else ""
    return notes


def _refuse_half_turns(photographs: Sequence[Photograph], source: CameraFiles) -> None:
    """Refuse photographs that EXIF turns upside down, unless it is known that the program did.

    The sizes of those that EXIF turns on their side fit only if it did; here no size tells.
    """
    unclear = [photograph for photograph in photographs if photograph.keeps_size]
    on_their_side = (p for p in photographs if p.turned and not p.keeps_size)
    if not unclear or any(p.width != p.height for p in on_their_side):
        return
    names = shortened([photograph.name for photograph in unclear])
    raise UserError(
        f"{source.path}: EXIF data turn {len(unclear)} photographs by 180 degrees ({names}), and "
        f"nothing tells whether {source.kind.program} did; if not, remove the orientation tag, "
        "else save them turned, without it"
    )


def _fitted(camera: KnownCamera, photograph: Photograph, path: Path) -> Any:
    """The lens at the size of the photograph, which may have been scaled."""
    lens = camera.lens
    width = photograph.width
    height = photograph.height
    own = lens_at(lens, width, height)
    if own is None:
        turned = " when turned as its EXIF data say" if photograph.turned else ""
        raise UserError(
            f"{path}, camera {camera.name}: is {lens.width} x {lens.height} px, but "
            f"{photograph.path} is {width} x {height} px{turned}; use the images that the cameras "
            "were computed from, without EXIF rotation"
        )
    return own
