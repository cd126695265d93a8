# SPDX-License-Identifier: Apache-2.0
"""The capture that a result was made from, by the record of its run, and cameras in its world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gaussian_splatting.data.reference_layout import load_reference_checkpoint
from gaussian_splatting.data.scene import Scene, load_scene, load_scene_for_checkpoint
from gaussian_splatting.vanilla.vanilla_run import CHECKPOINT_FOLDER
from sugar_extractors.results import note_path
from sugar_trainers.image_size import SugarSize
from sugar_utils.files import read_json
from sugar_utils.schemas import FileName, conform


class _Sources(msgspec.Struct):
    """Where a run says that its inputs lay."""

    scene: FileName | None = None
    checkpoint: FileName | None = None


@dataclass(frozen=True)
class Capture:
    """What results were made from, as far as it is known.

    Attributes:
        scene: The scene folder.
        checkpoint: The vanilla checkpoint whose cameras say where the world lies; None if the
            scene's own do.
    """

    scene: Path | None = None
    checkpoint: Path | None = None


def capture_of(
    results: Sequence[Path], scene: Path | None = None, checkpoint: Path | None = None
) -> Capture:
    """The folders that the user named, completed by what the results themselves tell.

    A vanilla checkpoint has its own cameras; the other stages have records of what they read.

    Args:
        results: Files, and folders of runs.
        scene: Scene folder, if it was named.
        checkpoint: Vanilla checkpoint, if it was named.

    Raises:
        UserError: A record is damaged.
    """
    if scene is not None and checkpoint is not None:
        return Capture(scene, checkpoint)
    found = (_recorded(record) for path in results for record in _records(path))
    recorded = next((one for one in found if one != Capture()), Capture())
    own = next((path for path in results if (path / "cameras.json").is_file()), None)
    return Capture(scene or recorded.scene, checkpoint or own or recorded.checkpoint)


def _records(path: Path) -> Iterator[Path]:
    """Files in which a stage says what it read, if there are any."""
    folder = path if path.is_dir() else path.parent
    for file in (note_path(path), folder / "run.json", folder / CHECKPOINT_FOLDER / "run.json"):
        if file.is_file():
            yield file


def _recorded(record: Path) -> Capture:
    """Folders of a record that are still there."""
    content: Any = read_json(record)
    found = content.get("sources") if isinstance(content, dict) else None
    advice = "pass the scene as -s and the vanilla checkpoint as -c"
    sources = conform(found or {}, _Sources, f"{record}, sources", advice)
    scene, checkpoint = (p and Path(p) for p in (sources.scene, sources.checkpoint))
    there = checkpoint and (checkpoint.is_file() or (checkpoint / "cameras.json").is_file())
    return Capture(scene if scene and scene.is_dir() else None, checkpoint if there else None)


def scene_of(
    scene_path: Path,
    checkpoint_path: Path | None,
    size: SugarSize,
    notify: Callable[[str], None],
) -> Scene:
    """Cameras in the world of the results.

    Args:
        scene_path: Scene folder.
        checkpoint_path: Whose cameras to take; None for those of the scene.
        size: Of the pictures.
        notify: Told what else the user should know.

    Raises:
        UserError: One of them is missing or damaged.
    """
    if checkpoint_path is None:
        return load_scene(scene_path, size_rule=size, notify=notify)
    checkpoint = load_reference_checkpoint(checkpoint_path, None, notify)
    return load_scene_for_checkpoint(
        scene_path,
        checkpoint,
        size_rule=size,
        images_dir=checkpoint.images_dir,
        require_images=False,
        notify=notify,
    )
