# SPDX-License-Identifier: Apache-2.0
"""Estimated masks in the scene folder, where they can be corrected: ``masks_auto``.

A record beside them has the digest of what was written. As long as it is theirs, a new estimate
replaces them; once they were edited, they are taken in place of an estimate.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import decode_mask
from gaussian_splatting.data.masks import (
    MaskOptions,
    object_mask_path,
    with_masks,
    write_object_mask,
)
from gaussian_splatting.data.names import IMAGE_SUFFIXES
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import (
    file_digest,
    read_json,
    replaced_folder,
    write_json_atomic,
)
from sugar_utils.schemas import conform

SCENE_MASKS = "masks_auto"
_RECORD = "written.json"


class _Written(msgspec.Struct):
    """``written.json``."""

    digest: str  # of the masks that the program wrote


def all_views(scene: Scene) -> list[Camera]:
    """Return the views of a scene: those to train on, and those held out."""
    return [*scene.cameras, *scene.dropped_test_cameras]


def edited_digest(root: Path) -> str | None:
    """Return a digest of the masks in a scene folder; None if there are none but the program's."""
    folder = root / SCENE_MASKS
    if not folder.is_dir():
        return None
    digest = _digest(folder)
    return None if digest == _written_digest(folder) else digest


def _digest(folder: Path) -> str:
    """Return a digest of names and contents of the images in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {file_digest(path)}\n".encode(errors="replace"))
    return digest.hexdigest()[:16]


def _written_digest(folder: Path) -> str | None:
    path = folder / _RECORD
    if not path.is_file():
        return None
    return conform(read_json(path), _Written, path).digest


def copy_edited_masks(scene: Scene, folder: Path, notify: Notify) -> None:
    """Write the masks of the scene folder as estimated ones.

    Args:
        folder: It gets them.

    Raises:
        UserError: A view has no mask there.
    """
    place = scene.root / SCENE_MASKS
    views = [camera for camera in all_views(scene) if camera.image_path is not None]
    masked = with_masks(views, scene.root, MaskOptions(masks=SCENE_MASKS), notify)
    missing = [camera.name for camera in masked if camera.mask is None]
    if missing:
        raise UserError(
            f"{place}: {len(missing)} of {len(views)} photographs have no mask there "
            f"({shortened(missing)}); add them, or remove the folder to estimate all anew"
        )
    for camera in masked:
        if camera.mask is not None:
            values = decode_mask(camera.mask, *camera.size)
            write_object_mask(folder, camera.name, values)


def write_scene_masks(scene: Scene, folder: Path, page: str, notify: Notify) -> None:
    """Copy estimated masks into the scene folder, unless edited ones are there.

    Args:
        folder: It has the masks.
        page: Name of the page of outlines in it.
    """
    place = scene.root / SCENE_MASKS
    if edited_digest(scene.root) is not None:
        return
    try:
        with replaced_folder(place) as fresh:
            fresh.mkdir(parents=True)
            for camera in all_views(scene):
                path = object_mask_path(folder, camera.name)
                if path.is_file():
                    copy = fresh / path.relative_to(folder)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)
            if (folder / page).is_file():
                shutil.copyfile(folder / page, fresh / page)
            write_json_atomic(fresh / _RECORD, {"digest": _digest(fresh)})
    except OSError as error:
        notify(f"note: masks are not copied to {place}: {error}; they are in {folder}")
        return
    notify(
        f"masks of the object: {place}, as outlines in {page} there; to correct them, edit the "
        "files, which later runs take as they are"
    )
