# SPDX-License-Identifier: Apache-2.0
"""Where photographs come from and results go in a scene folder, freed of the lens's distortion.

Photographs and masks as they were taken end up in ``input`` and ``input_masks`` (those that lie in
the scene folder itself stay), flat copies in ``images`` and ``masks``, the model in ``sparse/0``.
Until all is done everything new lies in ``distorted``; what was there before is moved, not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.colmap import find_model, read_reconstruction, write_model
from gaussian_splatting.data.images import decode_mask, undistorted
from gaussian_splatting.data.masks import FOLDERS as MASK_FOLDERS
from gaussian_splatting.data.names import RAW_SUFFIXES, VIDEO_SUFFIXES
from gaussian_splatting.data.transforms_json import find_transforms
from sugar_capture import photographs as pictures
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.known_cameras import capture_folders, find_cameras
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, file_digest, replaced_folder, write_json_atomic
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import memory_usage, reset_peak
from sugar_utils.schemas import FileName, read_checked

WORK = "distorted"
INPUT = "input"
INPUT_MASKS = "input_masks"
IMAGES = "images"
RECORD = "convert.json"
PAGE = "convert.html"

DIVISORS = (2, 4, 8)  # of the smaller copies that ``--resize`` makes
_JPEG = {"quality": 95, "subsampling": 0}


class ConvertRecord(msgspec.Struct):
    """``convert.json``: where the photographs are; beside it, what each step is made of."""

    source: FileName = INPUT
    cameras: str = ""
    rounds: str = ""  # digest of photographs, and how many rounds of a turntable they are
    published: bool = False


@dataclass(frozen=True)
class Source:
    root: Path
    folder: Path
    video: Path | None = None

    @property
    def work(self) -> Path:
        return self.root / WORK

    @property
    def recursive(self) -> bool:
        return self.folder != self.root


def scene_root(path: Path) -> Path:
    """The scene folder of what ``-s`` names: itself, or for a video the folder beside it."""
    is_video = path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir()
    return path.with_suffix("") if is_video else path


def is_scene(path: Path) -> bool:
    """Whether ``-s`` may name it: photographs, a video, or a folder that has cameras."""
    return needs_cameras(path) or _has_cameras(scene_root(path))


def needs_cameras(path: Path) -> bool:
    """Whether ``-s`` names a video or photographs without cameras, or with cameras of others."""
    root = scene_root(path)
    if root.is_dir() and _has_cameras(root):
        record = read_record(root)
        if not record.get("published"):
            return False
        source = _recorded(root, str(path) if path != root else record["source"])
        if not any(file.is_file() for file in _taken(source)):
            return False
        known = record.get("taken")
        cameras = record.get("cameras")
        with contextlib.suppress(UserError):  # --cameras named a file that is gone
            return not record.get("finished") or (
                bool(known) and known != source_digest(source, cameras=cameras)
            )
        return False
    if root != path:
        return path.is_file()
    return any(_pictures_in(root, name) for name in _places(root)) or bool(_videos_of(root))


def _places(root: Path) -> tuple[str, ...]:
    return (INPUT, IMAGES, *capture_folders(root), ".")


def _recorded(root: Path, began: str) -> Source:
    """What an earlier call noted as the source."""
    if began in _places(root):
        return Source(root, root / began)
    return Source(root, root / INPUT, Path(began))


def _taken(source: Source) -> list[Path]:
    video = source.video
    return [video] if video else pictures.picture_files(source.folder, source.recursive)


def source_digest(source: Source, masks: Path | None = None, cameras: str | None = None) -> str:
    """Digest of the names and contents of photographs, masks and cameras, or of a video.

    Args:
        masks: Folder of the masks; None for ``input_masks``.
        cameras: The flag ``--cameras``.
    """
    masks = masks or source.root / INPUT_MASKS
    files = [(path, path.parent if source.video else source.folder) for path in _taken(source)]
    files += [(path, masks) for path in pictures.picture_files(masks)]
    names = [[path.relative_to(root).as_posix(), file_digest(path)] for path, root in files]
    known = find_cameras(cameras, source.folder, source.root)
    return digest([*names, *([file_digest(path) for path in own.files] for own in known)])


def digest(*parts: Any) -> str:
    """One short text for what a result depends on; parts are JSON values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def find_source(path: Path) -> Source:
    """Photographs or a video of what ``-s`` names, where an earlier call found them first."""
    root = scene_root(path)
    if root != path:
        if not path.is_file():
            raise UserError(f"{path}: no such video; check -s")
        return Source(root, root / INPUT, path)
    if not root.exists():
        raise UserError(f"{root}: no such folder; check -s")
    if not root.is_dir():
        known = " ".join(VIDEO_SUFFIXES)
        raise UserError(f"{root}: neither a folder of photographs nor a video ({known})")
    began = read_record(root).get("source")
    if isinstance(began, str) and began not in ("", INPUT, IMAGES):
        return _recorded(root, began)
    for name in _places(root):
        if _pictures_in(root, name):
            return Source(root, root / name)
    videos = _videos_of(root)
    if len(videos) > 1:
        names = ", ".join(video.name for video in videos[:3])
        raise UserError(f"{root}: {len(videos)} videos ({names}); name one of them with -s")
    if videos:
        return Source(root, root / INPUT, videos[0])
    found = (pictures.files_named(root / name, RAW_SUFFIXES) for name in _places(root))
    raw = [path for files in found for path in files]
    if raw:
        raise UserError(
            f"{root}: {len(raw)} raw photographs ({raw[0].name}, ...) and no others; develop them "
            "to JPEG first"
        )
    raise UserError(
        f"{root}: no photographs; put them, or a video, into {root / INPUT}, or name a video "
        "with -s"
    )


def _pictures_in(root: Path, name: str) -> bool:
    return bool(pictures.picture_files(root / name, recursive=name != "."))


def _videos_of(root: Path) -> list[Path]:
    suffixes = VIDEO_SUFFIXES
    return pictures.files_named(root / INPUT, suffixes) or pictures.files_named(root, suffixes)


def _has_cameras(root: Path) -> bool:
    return find_model(root) is not None or bool(find_transforms(root))


def original_masks(source: Source, asked: str | None) -> tuple[str | None, Path | None]:
    """Where the masks of the photographs as they were taken are. asked: the flag ``--masks``"""
    if asked not in (None, *MASK_FOLDERS):
        return asked, None
    if (source.root / INPUT_MASKS).is_dir():
        return INPUT_MASKS, None
    for name in (asked,) if asked else MASK_FOLDERS:
        if (source.root / name).is_dir():
            return name, source.root / name
    return asked, None


def read_record(root: Path) -> dict[str, Any]:
    """What earlier calls noted; empty where there is nothing to go by."""
    with contextlib.suppress(UserError):
        return read_checked(root / WORK / RECORD, ConvertRecord)
    return {}


def note(source: Source, **facts: Any) -> None:
    began = source.folder.relative_to(source.root).as_posix()
    if source.video is not None:
        began = str(source.video.resolve())
    record = {**read_record(source.root), "source": began, **facts}
    kept = {name: value for name, value in record.items() if value is not None}
    write_json_atomic(source.work / RECORD, kept)


def require_free(source: Source, overwrite: bool) -> None:
    if overwrite or read_record(source.root) or not _has_cameras(source.root):
        return
    raise UserError(
        f"{source.root}: has cameras already; train on them, or pass --overwrite True to find "
        "them anew"
    )


def publish(source: Source, flat: Path, masks: Path | None) -> Source:
    """Give all results their places; called again after a kill it goes on.

    What a call before this one made is replaced, all else that is in the way is kept in
    ``distorted``.
    """
    root = source.root
    ours = bool(read_record(source.root).get("published"))
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
        if ours:
            shutil.rmtree(old, ignore_errors=True)
    return source


@dataclass
class Work:
    source: Source
    options: ConvertOptions
    console: Console
    steps: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def models(self) -> Path:
        """Folder of the models that were chosen, the largest as ``0``."""
        return self.source.work / "sparse"

    @property
    def flat(self) -> Path:
        """Folder of what will take its place in the scene."""
        return self.source.work / "flat"

    def noted(self, name: str, key: str) -> bool:
        """Whether an earlier call noted a step with these settings and inputs."""
        return read_record(self.source.root).get(name) == key

    @contextlib.contextmanager
    def step(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how far a step has come, with the time that is left; and note what it took."""
        began = time.monotonic()
        reset_peak("cpu")
        with self.console.progress(title, 1, total) as progress:
            # Of a step that goes on, what was done before says nothing about its speed.
            yield lambda done: progress.update(min(done, total)) if done else None
        self.steps.append((title, time.monotonic() - began, memory_usage("cpu").peak))


@dataclass(frozen=True)
class Original:
    photograph: pictures.Photograph
    mask: ViewMask | None
    flat_name: str


def originals(
    photographs: Sequence[pictures.Photograph], masks: Sequence[ViewMask | None]
) -> dict[str, Original]:
    flat = pictures.output_names(photographs)
    return {
        photograph.name: Original(photograph, mask, name)
        for photograph, mask, name in zip(photographs, masks, flat, strict=True)
    }


def write_flat_pictures(
    model: Any,
    by_name: Mapping[str, Original],
    folder: Path,
    resize: bool,
    advance: Callable[[int], None],
) -> None:
    """Write flat copies of all photographs that the model places; those that are there stay."""
    images = sorted((model.images[i] for i in model.reg_image_ids()), key=lambda i: i.name)
    for done, image in enumerate(images, start=1):
        original = by_name[image.name]
        _write_flat(original, model.cameras[image.camera_id], folder)
        if resize:
            _write_smaller(folder, original.flat_name)
        if original.mask is not None and not original.mask.alpha:
            _write_flat_mask(original, model.cameras[image.camera_id], folder)
        advance(done)


def _write_flat(original: Original, lens: Any, folder: Path) -> None:
    photograph = original.photograph
    target = folder / "images" / original.flat_name
    if target.is_file():
        return
    kept = original.flat_name == photograph.name
    with atomic_path(target) as temporary:
        if lens.is_undistorted() and kept and not photograph.turned and not photograph.depth:
            shutil.copyfile(photograph.path, temporary)
            return
        picture = pictures.read_upright(photograph.path)
        if target.suffix.lower() != ".png":
            picture = picture.convert("RGB")
        pixels = np.asarray(picture)
        if not lens.is_undistorted():
            pixels = undistorted(pixels, lens)
        _save(Image.fromarray(pixels), temporary)


def _write_flat_mask(original: Original, lens: Any, folder: Path) -> None:
    target = folder / "masks" / f"{original.flat_name}.png"
    if target.is_file():
        return
    photograph = original.photograph
    values = decode_mask(original.mask, photograph.width, photograph.height, upright=True)
    if not lens.is_undistorted():
        values = undistorted(values, lens)
    with atomic_path(target) as temporary:
        _save(Image.fromarray(values), temporary)


def _write_smaller(folder: Path, name: str) -> None:
    targets = {divisor: folder / f"images_{divisor}" / name for divisor in DIVISORS}
    missing = {divisor: path for divisor, path in targets.items() if not path.is_file()}
    if not missing:
        return
    with Image.open(folder / "images" / name) as picture:
        picture.load()
        for divisor, path in missing.items():
            size = tuple(max(1, round(side / divisor)) for side in picture.size)
            with atomic_path(path) as temporary:
                _save(picture.resize(size, Image.Resampling.LANCZOS), temporary)


def _save(picture: Image.Image, path: Path) -> None:
    is_png = path.suffix.lower() == ".png"
    picture.save(path, **({"compress_level": 1} if is_png else _JPEG))


def write_flat_model(source: Path, by_name: Mapping[str, Original], folder: Path) -> None:
    pycolmap = load_pycolmap()
    model = read_reconstruction(source)
    options = pycolmap.UndistortCameraOptions()
    lenses = {number: lens for number, lens in model.cameras.items() if not lens.is_undistorted()}
    flat = {number: pycolmap.undistort_camera(options, lens) for number, lens in lenses.items()}
    for image in model.images.values():
        number = image.camera_id
        if image.num_points2D() and number in flat:
            # Observed points move to where the flat photograph shows them.
            rays = lenses[number].cam_from_img(image.points2D)
            rays = np.concatenate([rays, np.ones((len(rays), 1))], axis=1)
            for point, xy in zip(image.points2D, flat[number].img_from_cam(rays), strict=True):
                point.xy = xy
        image.name = by_name[image.name].flat_name
    for number, lens in flat.items():
        model.cameras[number].mergedict(lens.todict())
    model.extract_colors_for_all_images(str(folder / "images"))
    with replaced_folder(folder / "sparse") as fresh:
        write_model(model, fresh / "0")
