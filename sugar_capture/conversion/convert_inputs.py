# SPDX-License-Identifier: Apache-2.0
"""The inputs of convert: images or frames of a video, their masks, cameras of other programs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gaussian_splatting.data.cameras import Camera, ViewMask
from gaussian_splatting.data.masks import FOLDERS as MASK_FOLDERS
from gaussian_splatting.data.masks import with_masks
from sugar_capture import panoramas, scene_folder
from sugar_capture.features.photographs import Photograph, described_photographs
from sugar_capture.gps.video_positions import srt_beside, video_track
from sugar_capture.known_cameras import KnownCameras, read_cameras, the_cameras
from sugar_capture.scene_folder import INPUT, Work, note
from sugar_capture.turntable import write_turntable_masks
from sugar_capture.video_frames import extract_frames
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.recipe import digest_of

_MIN_PHOTOGRAPHS = 3


@dataclass(frozen=True)
class ConvertInputs:
    """The images of a capture, and all that is known of them before they are registered."""

    photographs: list[Photograph]
    masks: list[ViewMask | None]  # of each photograph
    mask_folder: Path | None  # folder of the masks, which becomes ``input_masks``; None: it stays
    of_panoramas: bool = False  # whether the photographs are views of panoramas
    n_rounds: int = 0  # rounds of a turntable; 0 if the camera moved
    known: KnownCameras | None = None  # cameras of another program
    known_digests: list[str] = field(default_factory=list)  # of the files of these cameras

    def file_digests(self) -> list[list[str]]:
        """Return name and digest of each photograph."""
        return file_digests(self.photographs)

    def mask_digests(self) -> list[list[str | bool] | None]:
        """Return digest and kind of the mask of each photograph; None without a mask."""
        digests = []
        for mask in self.masks:
            digests.append(None if mask is None else [file_digest(mask.path), mask.alpha])
        return digests


def read_inputs(work: Work) -> ConvertInputs:
    """Read photographs, masks and cameras; frames, masks and views are written where needed."""
    photographs = _read_photographs(work)
    panorama_flag = work.options.sfm.panoramas
    if panoramas.are_panoramas(photographs, panorama_flag, work.console.info):
        masks, mask_folder = _find_masks(work, photographs)
        views, view_masks = _cut_panoramas(work, photographs, masks)
        return ConvertInputs(views, view_masks, mask_folder, of_panoramas=True)
    cameras = _read_known_cameras(work, photographs)
    if cameras is not None:
        masks, mask_folder = _find_masks(work, cameras.photographs)
        digests = [file_digest(path) for path in cameras.source.files]
        return ConvertInputs(
            cameras.photographs, masks, mask_folder, known=cameras, known_digests=digests
        )
    n_rounds = _mask_turntable(work, photographs)
    masks, mask_folder = _find_masks(work, photographs)
    return ConvertInputs(photographs, masks, mask_folder, n_rounds=n_rounds)


def file_digests(photographs: Sequence[Photograph]) -> list[list[str]]:
    """Return name and digest of each photograph."""
    return [[photograph.name, file_digest(photograph.path)] for photograph in photographs]


def _read_photographs(work: Work) -> list[Photograph]:
    """Describe the photographs of the folder; frames of a video are written into it first."""
    source = work.source
    if source.video is not None:
        n_frames = work.options.sfm.frames
        choice = extract_frames(source.video, source.folder, n_frames, work.step)
        repeated = f"; in {choice.repeated} intervals nothing moved" if choice.repeated else ""
        converted = f"; {choice.colors} converted to sRGB" if choice.colors else ""
        work.console.info(
            f"{source.video.name}: {len(choice.frames)} of {choice.of} frames{repeated}{converted}"
        )
    photographs = described_photographs(source.folder, source.recursive, work.console.info)
    if source.video is not None:
        n_placed = sum(photograph.gps is not None for photograph in photographs)
        subtitles = srt_beside(source.video)
        if n_placed:
            work.console.info(f"{n_placed} frames have GPS positions from the video")
        elif subtitles is not None:
            reason = "has no positions that can be read"
            if video_track(source.video) is not None:
                reason = (
                    f"has positions, and the frames were written without; remove {INPUT} for it"
                )
            work.console.info(f"note: {subtitles.name} {reason}")
    if len(photographs) < _MIN_PHOTOGRAPHS:
        raise UserError(
            f"{source.folder}: {len(photographs)} photographs; at least {_MIN_PHOTOGRAPHS} are "
            "needed, and some dozens make a good model"
        )
    return photographs


def _read_known_cameras(work: Work, photographs: Sequence[Photograph]) -> KnownCameras | None:
    """Read the cameras of another program; None if there are none, or they do not count."""
    source = work.source
    named = work.options.sfm.cameras
    if work.options.skip_matching or (source.video and named is None):
        return None
    files = the_cameras(named, source.folder, source.root)
    if files is None:
        return None
    cameras = read_cameras(files, photographs)
    n = len(photographs)
    n_matched = len(cameras.cameras)
    moved = f"; {cameras.offset} subtracted from all places" if cameras.offset else ""
    work.console.info(f"cameras of {files.name}, {n_matched} of {n} photographs{moved}")
    for line in cameras.notes:
        work.console.info(f"note: {line}")
    return cameras


def _mask_turntable(work: Work, photographs: Sequence[Photograph]) -> int:
    """Write masks of the rounds of a turntable; 0 if the camera moved, or there are masks."""
    source = work.source
    mask_flag = work.options.masks.masks
    folder = source.root / MASK_FOLDERS[0]
    files = digest_of(file_digests(photographs))
    noted_files, _, noted_rounds = (
        scene_folder.read_record(source.root).get("rounds", "").partition(" ")
    )
    if noted_files == files:
        return int(noted_rounds)
    if mask_flag is not None or scene_folder.original_masks(source, mask_flag).name is not None:
        return 0
    n_rounds = write_turntable_masks(photographs, folder)
    if n_rounds:
        work.console.info(
            f"a turntable, {n_rounds} round{'s' * (n_rounds > 1)}: the background stands still; "
            f"masks of what moves are in {folder}; --masks none to do without them"
        )
    if n_rounds == 1 and not any(photograph.focal for photograph in photographs):
        work.console.info(
            "note: one round does not tell the focal length, and EXIF has none; add a round from "
            "another height"
        )
    note(source, rounds=f"{files} {n_rounds}")
    return n_rounds


def _find_masks(
    work: Work, photographs: Sequence[Photograph]
) -> tuple[list[ViewMask | None], Path | None]:
    """Return the mask of each photograph, and the folder of masks that is to be moved."""
    original = scene_folder.original_masks(work.source, work.options.masks.masks)
    # Cameras without lens and pose, by which masks are looked up.
    cameras = []
    for photograph in photographs:
        camera = Camera(
            name=photograph.name,
            width=photograph.width,
            height=photograph.height,
            fx=1.0,
            fy=1.0,
            cx=0.0,
            cy=0.0,
            rotation=np.eye(3),
            translation=np.zeros(3),
            image_path=photograph.path,
        )
        cameras.append(camera)
    options = replace(work.options.masks, masks=original.name)
    masked = with_masks(cameras, work.source.root, options, work.console.info)
    masks = [camera.mask for camera in masked]
    return masks, original.folder if any(masks) else None


def _cut_panoramas(
    work: Work, photographs: Sequence[Photograph], masks: Sequence[ViewMask | None]
) -> tuple[list[Photograph], list[ViewMask | None]]:
    """Write six square views of each panorama, and their masks."""
    angle = work.options.sfm.photographer
    if angle is not None and work.options.masks.mask_mode != "ignore":
        raise UserError(
            "--photographer: what it hides says nothing, while --mask_mode object means that "
            "nothing is there; pass --mask_mode ignore, in training as well"
        )
    mask_facts = []
    for mask in masks:
        facts = None if mask is None else [file_digest(mask.path), mask.alpha, mask.mode]
        mask_facts.append(facts)
    key = digest_of(file_digests(photographs), mask_facts, angle)
    folder = work.source.work / f"views_{key}"
    for other in work.source.work.glob("views_*"):
        if other != folder:
            shutil.rmtree(other)
    with work.step("cutting panoramas into views", len(photographs)) as advance:
        return panoramas.write_views(photographs, masks, folder, angle, advance)
