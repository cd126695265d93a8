# SPDX-License-Identifier: Apache-2.0
"""The captures of results, found by their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.scenes.reference_layout import CHECKPOINT_FOLDER, load_reference_checkpoint
from gaussian_splatting.scenes.scene import Scene, load_scene, load_scene_for_checkpoint
from sugar_scene.bound_model import state_with_background
from sugar_trainers.capture import SugarSize
from sugar_utils import files as storage
from sugar_utils.errors import Notify, UserError
from sugar_utils.recipe import note_path
from sugar_utils.schemas import FileName, conform

T = TypeVar("T")


class _Sources(msgspec.Struct):
    """Paths in the record of a stage."""

    scene: FileName | None = None
    checkpoint: FileName | None = None


@dataclass(frozen=True)
class Capture:
    """Folders that results were made from; None where unknown."""

    scene: Path | None = None
    # The vanilla checkpoint whose cameras say where the world lies; None if the scene's own do.
    checkpoint: Path | None = None
    # A checkpoint that a record names and that is gone; the world may be another than the scene's.
    missing: Path | None = None


def capture_of(
    results: Sequence[Path], scene: Path | None = None, checkpoint: Path | None = None
) -> Capture:
    """Return the folders that the user named, completed by the records of the results.

    A vanilla checkpoint has its own cameras; stages and placements have records of what they read,
    or of the model that they were made of, which has one.
    """
    if scene is not None and checkpoint is not None:
        return Capture(scene, checkpoint)
    recorded = _first_recorded(results)
    if checkpoint is None:
        with_cameras = (path for path in results if (path / "cameras.json").is_file())
        checkpoint = next(with_cameras, recorded.checkpoint)
    missing = recorded.missing if checkpoint is None else None
    return Capture(scene or recorded.scene, checkpoint, missing)


def _first_recorded(results: Sequence[Path]) -> Capture:
    """Return the first capture that the records of some results name."""
    for path in results:
        capture = _recorded(path)
        if capture != Capture():
            return capture
    return Capture()


def _recorded(path: Path, visited: frozenset[Path] = frozenset()) -> Capture:
    """Return the capture that the records of a result, or of the model that it was made of, name.

    Args:
        path: The result.
        visited: Results that led here, resolved: records of damaged folders may go in circles.
    """
    folder = path if path.is_dir() else path.parent
    for file in (note_path(path), folder / "run.json", folder / CHECKPOINT_FOLDER / "run.json"):
        if file.is_file():
            capture = _sources_of(file)
            if capture != Capture():
                return capture
    origin = Placement.of(path).origin
    capture = _existing(origin.scene, origin.checkpoint)
    visited |= {path.resolve()}
    model = origin.model
    if origin.checkpoint is None and model is not None and model.resolve() not in visited:
        of_model = _recorded(model, visited)
        capture = replace(of_model, scene=capture.scene or of_model.scene)
    return capture


def _sources_of(record: Path) -> Capture:
    """Return the folders that the record of a stage names."""
    content = storage.read_json(record)
    values = content.get("sources") if isinstance(content, dict) else None
    advice = "pass the scene as -s and the vanilla checkpoint as -c"
    sources = conform(values or {}, _Sources, f"{record}, sources", advice)
    scene = Path(sources.scene) if sources.scene else None
    return _existing(scene, Path(sources.checkpoint) if sources.checkpoint else None)


def _existing(scene: Path | None, checkpoint: Path | None) -> Capture:
    """Return a capture of folders that are still there."""
    if scene is not None and not scene.is_dir():
        scene = None
    if checkpoint is None or checkpoint.is_file() or (checkpoint / "cameras.json").is_file():
        return Capture(scene, checkpoint)
    return Capture(scene, None, checkpoint)


def scene_of(
    capture: Capture,
    size: SugarSize,
    notify: Notify,
    require_images: bool = False,
    **options: Any,
) -> Scene:
    """Read the capture in the world of results: of a vanilla checkpoint, or else of the scene.

    Args:
        capture: With its scene.
        size: Of the images.
        notify: Called with lines about what is changed or left out.
        require_images: Whether cameras of a checkpoint need their images.
        options: Others of :func:`load_scene`.
    """
    if capture.scene is None:
        raise ValueError("a capture without a scene cannot be read")
    if capture.checkpoint is None:
        if capture.missing is not None:
            notify(
                f"note: {capture.missing}, whose cameras say where the result lies, is gone; the "
                "cameras of the scene are taken, pass another checkpoint as -c if they differ"
            )
        return load_scene(capture.scene, size_rule=size, notify=notify, **options)
    checkpoint = load_reference_checkpoint(capture.checkpoint, None, notify)
    return load_scene_for_checkpoint(
        capture.scene,
        checkpoint,
        size_rule=size,
        images_dir=checkpoint.images_dir,
        require_images=require_images,
        notify=notify,
        **options,
    )


def read_state(path: Path, build: Callable[[dict[str, Any]], T]) -> T:
    """Build an object from the parameters in a ``.pt`` of any stage; errors name the file."""
    payload = load_payload(path)
    try:
        return build(state_with_background(payload))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
