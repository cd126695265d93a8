# SPDX-License-Identifier: Apache-2.0
"""The layout of a scene folder: where images come from, and where undistorted copies go.

Images and masks as they were taken end up in ``input`` and ``input_masks`` (those that are in the
scene folder itself stay), flat copies in ``images`` and ``masks``, the model in ``sparse/0``. Until
all is done, everything new is in ``distorted``; files that were there before are only moved.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.colmap import find_model, read_reconstruction, write_model
from gaussian_splatting.data.images import decode_mask, undistorted
from gaussian_splatting.data.masks import FOLDERS as MASK_FOLDERS
from gaussian_splatting.data.names import RAW_SUFFIXES, VIDEO_SUFFIXES
from gaussian_splatting.scenes.transforms_json import find_transforms
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.features import photographs as pictures
from sugar_capture.known_cameras import capture_folders, find_cameras
from sugar_utils.console import Console
from sugar_utils.errors import Advance, UserError
from sugar_utils.files import (
    atomic_path,
    file_digest,
    replaced_folder,
    without_none,
    write_json_atomic,
)
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import memory_usage, reset_peak
from sugar_utils.recipe import digest_of
from sugar_utils.schemas import FileName, read_checked

if TYPE_CHECKING:
    import pycolmap

WORK = "distorted"
INPUT = "input"
INPUT_MASKS = "input_masks"
IMAGES = "images"
RECORD = "convert.json"
PAGE = "convert.html"

DIVISORS = (2, 4, 8)  # of the smaller copies that ``--resize`` makes
_JPEG_QUALITY = 95


class ConvertRecord(msgspec.Struct):
    """``convert.json``: where the images are; its other keys are notes of finished steps."""

    source: FileName = INPUT  # folder of the images in the scene, or absolute path of the video
    cameras: str = ""  # the flag ``--cameras``
    rounds: str = ""  # digest of the images, and the number of rounds of a turntable
    published: bool = False  # results are in the scene


@dataclass(frozen=True)
class Source:
    """A scene folder, and the folder of its images or its video."""

    root: Path  # scene folder
    folder: Path  # of the images, or of the frames of the video
    video: Path | None = None

    @property
    def work(self) -> Path:
        """Folder of all that is not finished."""
        return self.root / WORK

    @property
    def recursive(self) -> bool:
        """Whether images may be in folders of the folder."""
        return self.folder != self.root


class OriginalMasks(NamedTuple):
    """Where the masks of the images as they were taken are."""

    name: str | None  # for the flag ``--masks``
    folder: Path | None  # a folder that is to become ``input_masks``


def scene_root(path: Path) -> Path:
    """Return the scene folder of ``-s``: the path itself, or for a video the folder beside it."""
    is_video = path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir()
    return path.with_suffix("") if is_video else path


def is_scene(path: Path) -> bool:
    """Whether ``-s`` may name a path: images, a video, or a folder that has cameras."""
    return needs_cameras(path) or _has_cameras(scene_root(path))


def needs_cameras(path: Path) -> bool:
    """Whether ``-s`` names a video, or images without current cameras."""
    root = scene_root(path)
    if root.is_dir() and _has_cameras(root):
        return _is_outdated(path, root)
    if root != path:
        return path.is_file()
    has_pictures = any(_pictures_in(root, name) for name in _image_folders(root))
    return has_pictures or bool(_videos_of(root))


def _is_outdated(path: Path, root: Path) -> bool:
    """Whether the cameras of a scene are convert's, and made of other files than are there now."""
    record = read_record(root)
    if not record.get("published"):
        return False
    source_name = record["source"] if path == root else str(path)
    source = _recorded_source(root, source_name)
    if not any(file.is_file() for file in _input_files(source)):
        return False
    if not record.get("finished"):
        return True
    noted_digest = record.get("taken")
    if not noted_digest:
        return False
    with contextlib.suppress(UserError):  # --cameras named a file that is gone
        return noted_digest != source_digest(source, cameras=record.get("cameras"))
    return False


def _image_folders(root: Path) -> tuple[str, ...]:
    """Return the folders in which images are looked for, in this order."""
    return (INPUT, IMAGES, *capture_folders(root), ".")


def _recorded_source(root: Path, name: str) -> Source:
    """Return the source that an earlier call noted: a folder of the scene, or a video."""
    if name in _image_folders(root):
        return Source(root, root / name)
    return Source(root, root / INPUT, Path(name))


def _input_files(source: Source) -> list[Path]:
    if source.video is not None:
        return [source.video]
    return pictures.picture_files(source.folder, source.recursive)


def source_digest(source: Source, masks: Path | None = None, cameras: str | None = None) -> str:
    """Return a digest of the names and contents of images, masks and cameras, or of a video.

    Args:
        masks: Folder of the masks; None for ``input_masks``.
        cameras: The flag ``--cameras``.
    """
    mask_folder = masks or source.root / INPUT_MASKS
    input_folder = source.folder
    if source.video is not None:
        input_folder = source.video.parent
    entries: list[list[str]] = []
    for path in _input_files(source):
        entries.append([path.relative_to(input_folder).as_posix(), file_digest(path)])
    for path in pictures.picture_files(mask_folder):
        entries.append([path.relative_to(mask_folder).as_posix(), file_digest(path)])
    for camera_files in find_cameras(cameras, source.folder, source.root):
        entries.append([file_digest(path) for path in camera_files.files])
    return digest_of(entries)


def find_source(path: Path) -> Source:
    """Find the images or the video of ``-s``, where an earlier call found them first.

    Raises:
        UserError: There are none, or several videos.
    """
    root = scene_root(path)
    if root != path:
        if not path.is_file():
            raise UserError(f"{path}: no such video; check -s")
        return Source(root, root / INPUT, path)
    if not root.exists():
        raise UserError(f"{root}: no such folder; check -s")
    if not root.is_dir():
        suffixes = " ".join(VIDEO_SUFFIXES)
        raise UserError(f"{root}: neither a folder of photographs nor a video ({suffixes})")
    noted_name = read_record(root).get("source")
    if isinstance(noted_name, str) and noted_name not in ("", INPUT, IMAGES):
        return _recorded_source(root, noted_name)
    for name in _image_folders(root):
        if _pictures_in(root, name):
            return Source(root, root / name)
    videos = _videos_of(root)
    if len(videos) > 1:
        names = ", ".join(video.name for video in videos[:3])
        raise UserError(f"{root}: {len(videos)} videos ({names}); name one of them with -s")
    if videos:
        return Source(root, root / INPUT, videos[0])
    raise _no_photographs(root)


def original_photographs(root: Path) -> dict[str, Path]:
    """Return the photographs of a scene as they were taken, by their names.

    A name may be in several folders: that of the photographs that convert was given comes first.

    Raises:
        UserError: There are HEIC files, and their reader is not installed.
    """
    noted_name = read_record(root).get("source", INPUT)
    files: dict[str, Path] = {}
    for name in (noted_name, INPUT, *capture_folders(root), "."):
        if name not in _image_folders(root):
            # The video whose frames are in the folder of originals.
            continue
        folder = root / name
        for path in pictures.picture_files(folder, recursive=name != "."):
            files.setdefault(path.relative_to(folder).as_posix(), path)
    pictures.register_heif_reader(list(files.values()))
    return files


def _no_photographs(root: Path) -> UserError:
    raw_files = []
    for name in _image_folders(root):
        raw_files += pictures.files_named(root / name, RAW_SUFFIXES)
    if raw_files:
        return UserError(
            f"{root}: {len(raw_files)} raw photographs ({raw_files[0].name}, ...) and no others; "
            "develop them to JPEG first"
        )
    return UserError(
        f"{root}: no photographs in it; put them, or a video, into {root / INPUT}, or name a "
        "video with -s"
    )


def _pictures_in(root: Path, name: str) -> bool:
    return bool(pictures.picture_files(root / name, recursive=name != "."))


def _videos_of(root: Path) -> list[Path]:
    videos = pictures.files_named(root / INPUT, VIDEO_SUFFIXES)
    return videos or pictures.files_named(root, VIDEO_SUFFIXES)


def _has_cameras(root: Path) -> bool:
    return find_model(root) is not None or bool(find_transforms(root))


def original_masks(source: Source, named: str | None) -> OriginalMasks:
    """Return where the masks of the images as they were taken are.

    Args:
        named: The flag ``--masks``.
    """
    if named not in (None, *MASK_FOLDERS):
        return OriginalMasks(named, None)
    if (source.root / INPUT_MASKS).is_dir():
        return OriginalMasks(INPUT_MASKS, None)
    for name in (named,) if named else MASK_FOLDERS:
        if (source.root / name).is_dir():
            return OriginalMasks(name, source.root / name)
    return OriginalMasks(named, None)


def read_record(root: Path) -> dict[str, Any]:
    """Read the notes of earlier calls; empty where there are none, or they are damaged."""
    with contextlib.suppress(UserError):
        return read_checked(root / WORK / RECORD, ConvertRecord)
    return {}


def note(source: Source, **facts: object) -> None:
    """Add facts to the record of a scene; None removes one."""
    source_name = source.folder.relative_to(source.root).as_posix()
    if source.video is not None:
        source_name = str(source.video.resolve())
    record = {**read_record(source.root), "source": source_name, **facts}
    write_json_atomic(source.work / RECORD, without_none(record))


def require_free(source: Source, overwrite: bool) -> None:
    """Raise a ``UserError`` if the scene has cameras of another program, unless told to go on."""
    if overwrite or read_record(source.root) or not _has_cameras(source.root):
        return
    raise UserError(
        f"{source.root}: has cameras already; train on them, or pass --overwrite True to find "
        "them anew"
    )


def publish(source: Source, flat: Path, masks: Path | None) -> Source:
    """Move all results into the scene; called again after a kill it goes on.

    Results of an earlier call are replaced; other files that are in the way are moved to
    ``distorted``.

    Args:
        flat: Folder of the results.
        masks: Folder of masks that becomes ``input_masks``; None: there is none.

    Returns:
        The source, whose images may have been moved.
    """
    root = source.root
    is_published = bool(read_record(source.root).get("published"))
    if source.folder == root / IMAGES and (flat / IMAGES).is_dir():
        source.folder.rename(root / INPUT)
        source = Source(root, root / INPUT)
    if masks is not None and masks.is_dir() and not (root / INPUT_MASKS).exists():
        masks.rename(root / INPUT_MASKS)
    # The model comes last: with it the scene counts as complete.
    names = sorted(path.name for path in flat.iterdir() if not path.name.startswith("."))
    for name in sorted(names, key=lambda name: name == "sparse"):
        old = source.work / f"old_{name}"
        if (root / name).exists():
            shutil.rmtree(old, ignore_errors=True)
            (root / name).rename(old)
        (flat / name).rename(root / name)
        if is_published:
            shutil.rmtree(old, ignore_errors=True)
    return source


class Step(NamedTuple):
    """A finished step of a call."""

    name: str
    seconds: float
    peak_bytes: int


@dataclass
class Work:
    """One call of convert: its source, options, console and finished steps."""

    source: Source
    options: ConvertOptions
    console: Console
    steps: list[Step] = field(default_factory=list)

    @property
    def models(self) -> Path:
        """Folder of the models that were chosen, the largest as ``0``."""
        return self.source.work / "sparse"

    @property
    def flat(self) -> Path:
        """Folder of the results that are moved into the scene at the end."""
        return self.source.work / "flat"

    def noted(self, name: str, key: str) -> bool:
        """Whether an earlier call noted a step with these settings and inputs."""
        return read_record(self.source.root).get(name) == key

    @contextlib.contextmanager
    def step(self, title: str, total: int) -> Iterator[Advance]:
        """Show the progress of a step with the remaining time, and record its duration."""
        start_time = time.monotonic()
        reset_peak("cpu")
        with self.console.progress(title, 1, total) as progress:

            def advance(n_done: int) -> None:
                # The finished part of a resumed step does not count for the speed.
                if n_done:
                    progress.update(min(n_done, total))

            yield advance
        seconds = time.monotonic() - start_time
        self.steps.append(Step(title, seconds, memory_usage("cpu").peak))


@dataclass(frozen=True)
class Original:
    """An image as it was taken, with its mask and the name of its undistorted copy."""

    photograph: pictures.Photograph
    mask: ViewMask | None
    flat_name: str


def originals(
    photographs: Sequence[pictures.Photograph], masks: Sequence[ViewMask | None]
) -> dict[str, Original]:
    """Return the images by name, each with its mask."""
    flat_names = pictures.output_names(photographs)
    return {
        photograph.name: Original(photograph, mask, flat_name)
        for photograph, mask, flat_name in zip(photographs, masks, flat_names, strict=True)
    }


def write_flat_pictures(
    model: pycolmap.Reconstruction,
    by_name: Mapping[str, Original],
    folder: Path,
    resize: bool,
    advance: Advance,
) -> None:
    """Write undistorted copies of all images that a model registers; existing copies stay.

    Args:
        model: ``pycolmap.Reconstruction``.
        resize: Write reduced copies as well.
    """
    images = [model.images[number] for number in model.reg_image_ids()]
    images.sort(key=lambda image: image.name)
    for n_done, image in enumerate(images, start=1):
        original = by_name[image.name]
        lens = model.cameras[image.camera_id]
        _write_flat(original, lens, folder)
        if resize:
            _write_smaller(folder, original.flat_name)
        if original.mask is not None and not original.mask.alpha:
            _write_flat_mask(original, lens, folder)
        advance(n_done)


def _write_flat(original: Original, lens: pycolmap.Camera, folder: Path) -> None:
    photograph = original.photograph
    target = folder / "images" / original.flat_name
    if target.is_file():
        return
    keeps_format = original.flat_name == photograph.name
    keeps_pixels = lens.is_undistorted() and not photograph.turned and not photograph.depth
    with atomic_path(target) as temporary:
        if keeps_format and keeps_pixels:
            shutil.copyfile(photograph.path, temporary)
            return
        picture = pictures.read_upright(photograph.path)
        if target.suffix.lower() != ".png":
            picture = picture.convert("RGB")
        pixels = np.asarray(picture)
        if not lens.is_undistorted():
            pixels = undistorted(pixels, lens)
        _save(Image.fromarray(pixels), temporary)


def _write_flat_mask(original: Original, lens: pycolmap.Camera, folder: Path) -> None:
    target = folder / "masks" / f"{original.flat_name}.png"
    if target.is_file():
        return
    photograph = original.photograph
    if original.mask is None:
        raise ValueError(f"{original.flat_name} has no mask")
    values = decode_mask(original.mask, photograph.width, photograph.height, upright=True)
    if not lens.is_undistorted():
        values = undistorted(values, lens)
    with atomic_path(target) as temporary:
        _save(Image.fromarray(values), temporary)


def _write_smaller(folder: Path, name: str) -> None:
    """Write reduced copies of an undistorted image; existing copies stay."""
    missing = {}
    for divisor in DIVISORS:
        path = folder / f"images_{divisor}" / name
        if not path.is_file():
            missing[divisor] = path
    if not missing:
        return
    with Image.open(folder / "images" / name) as picture:
        picture.load()
        for divisor, path in missing.items():
            width = max(1, round(picture.width / divisor))
            height = max(1, round(picture.height / divisor))
            smaller = picture.resize((width, height), Image.Resampling.LANCZOS)
            with atomic_path(path) as temporary:
                _save(smaller, temporary)


def _save(picture: Image.Image, path: Path) -> None:
    if path.suffix.lower() == ".png":
        picture.save(path, compress_level=1)
    else:
        picture.save(path, quality=_JPEG_QUALITY, subsampling=0)


def write_flat_model(source: Path, by_name: Mapping[str, Original], folder: Path) -> None:
    """Write the model of the undistorted copies.

    Args:
        source: Folder of the model of the images as they were taken.
        folder: It has the copies in ``images``, and gets ``sparse/0``.
    """
    pycolmap = load_pycolmap()
    model = read_reconstruction(source)
    options = pycolmap.UndistortCameraOptions()
    lenses = {number: lens for number, lens in model.cameras.items() if not lens.is_undistorted()}
    flat_lenses = {}
    for number, lens in lenses.items():
        flat_lenses[number] = pycolmap.undistort_camera(options, lens)
    for image in model.images.values():
        number = image.camera_id
        if image.num_points2D() and number in flat_lenses:
            _undistort_keypoints(image, lenses[number], flat_lenses[number])
        image.name = by_name[image.name].flat_name
    for number, lens in flat_lenses.items():
        model.cameras[number].mergedict(lens.todict())
    model.extract_colors_for_all_images(str(folder / "images"))
    with replaced_folder(folder / "sparse") as fresh:
        write_model(model, fresh / "0")


def _undistort_keypoints(
    image: pycolmap.Image, lens: pycolmap.Camera, flat_lens: pycolmap.Camera
) -> None:
    """Move the keypoints of an image to where its undistorted copy shows them."""
    rays = lens.cam_from_img(image.points2D)
    rays = np.concatenate([rays, np.ones((len(rays), 1))], axis=1)
    pixels = np.asarray(flat_lens.img_from_cam(rays))
    for point, xy in zip(image.points2D, pixels, strict=True):
        point.xy = xy
