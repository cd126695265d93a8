# SPDX-License-Identifier: Apache-2.0
"""Results and the notes beside them: what they were made from, and the capture they belong to.

A result that is replaced stays until the new one is complete on the disk. Several files cannot be
renamed at once, so while they are, the note holds the digests of the new files and the note of the
old ones: whatever moment a process is killed in, the next one can tell which of the two is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gaussian_splatting.data.reference_layout import CHECKPOINT_FOLDER, load_reference_checkpoint
from gaussian_splatting.data.scene import Scene, load_scene, load_scene_for_checkpoint
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.run_identity import Identity
from sugar_scene.bound_model import state_with_background
from sugar_trainers.capture import SugarSize
from sugar_utils import files as storage
from sugar_utils.errors import Notify, OtherSettings, UserError
from sugar_utils.schemas import FileName, ResultNote, conform, read_checked

_REPLACES = "replaces"
T = TypeVar("T")


def note_path(result: Path) -> Path:
    """Return the JSON file beside a result."""
    return result.with_suffix(".json")


def read_note(files: Sequence[Path]) -> tuple[dict[str, Any], bool]:
    """Return the note of the files that exist, and whether the files belong together."""
    path = note_path(files[-1])
    note = read_checked(path, ResultNote) if path.is_file() else {}
    replaced = note.get(_REPLACES)
    digests = note.get("files")
    if not isinstance(replaced, dict) or not isinstance(digests, dict):
        return note, True
    present = [file for file in files if file.is_file()]
    is_new = [storage.file_digest(file) == digests.get(file.name) for file in present]
    if not any(is_new):
        return replaced, True
    return note, all(is_new) and len(present) == len(files)


def is_finished(files: Sequence[Path], identity: Identity, overwrite: bool, flag: str) -> bool:
    """Return whether a result is there that was made with the same settings and inputs.

    Args:
        flag: That chooses another place, for the error.

    Raises:
        UserError: There is another one, and it may not be overwritten.
    """
    if not files[-1].exists():
        return False
    note, belong_together = read_note(files)
    differences = identity.differences(note)
    if note and not differences:
        return belong_together and all(file.is_file() for file in files)
    if overwrite:
        return False
    why = f"was made with other settings or inputs ({'; '.join(differences)})"
    raise OtherSettings(
        f"{files[-1]} exists and {why if note else 'has no settings beside it'}; pass --overwrite "
        f"True to replace it, or another {flag}",
        files[-1].parent,
        differences,
        flag,
    )


def alone_with(result: Path, flag: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other process makes the same result."""
    advice = f"wait until it ends, stop it, or choose another {flag}"
    folder = storage.check_writable(result.parent)
    return storage.exclusive(folder, advice, name=f".{result.stem}.lock")


@contextlib.contextmanager
def publish(
    files: Sequence[Path], identity: Identity, result: Callable[[], Mapping[str, Any]]
) -> Iterator[dict[Path, Path]]:
    """Write the files of a result, and its note; an earlier result is there until the end."""
    last = files[-1]
    replaces = files[-1].exists()
    old = read_note(files)[0] if replaces else {}
    with contextlib.ExitStack() as stack:
        # The last one to be entered takes its final name first.
        temporary = {}
        for file in reversed(files):
            temporary[file] = stack.enter_context(storage.atomic_path(file))
        yield temporary
        digests = {file.name: storage.file_digest(temporary[file]) for file in files}
        note = {**identity.record(), "result": dict(result()), "files": digests}
        first_note = {**note, _REPLACES: old} if replaces else note
        storage.write_json_atomic(note_path(last), first_note)
    if not replaces:
        return
    names = old.get("files")
    for name in names if isinstance(names, dict) else ():
        path = last.parent / name
        # What a note says must not lead to other results.
        if name not in digests and path.stem == last.stem and path.parent == last.parent:
            path.unlink(missing_ok=True)
    storage.write_json_atomic(note_path(last), note)


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


def capture_of(
    results: Sequence[Path], scene: Path | None = None, checkpoint: Path | None = None
) -> Capture:
    """Return the folders that the user named, completed by the records of the results.

    A vanilla checkpoint has its own cameras; the other stages have records of what they read.
    """
    if scene is not None and checkpoint is not None:
        return Capture(scene, checkpoint)
    recorded = _first_recorded(results)
    if checkpoint is None:
        with_cameras = (path for path in results if (path / "cameras.json").is_file())
        checkpoint = next(with_cameras, recorded.checkpoint)
    return Capture(scene or recorded.scene, checkpoint)


def _first_recorded(results: Sequence[Path]) -> Capture:
    """Return the first capture that the records of some results name."""
    for path in results:
        for record in _records(path):
            capture = _recorded(record)
            if capture != Capture():
                return capture
    return Capture()


def _records(path: Path) -> Iterator[Path]:
    """Yield the files in which a stage recorded what it read."""
    folder = path if path.is_dir() else path.parent
    for file in (note_path(path), folder / "run.json", folder / CHECKPOINT_FOLDER / "run.json"):
        if file.is_file():
            yield file


def _recorded(record: Path) -> Capture:
    """Return the folders that a record names and that are still there."""
    content = storage.read_json(record)
    values = content.get("sources") if isinstance(content, dict) else None
    advice = "pass the scene as -s and the vanilla checkpoint as -c"
    sources = conform(values or {}, _Sources, f"{record}, sources", advice)
    scene = None
    if sources.scene and Path(sources.scene).is_dir():
        scene = Path(sources.scene)
    checkpoint = None
    if sources.checkpoint:
        path = Path(sources.checkpoint)
        if path.is_file() or (path / "cameras.json").is_file():
            checkpoint = path
    return Capture(scene, checkpoint)


def scene_of(
    scene_path: Path, checkpoint_path: Path | None, size: SugarSize, notify: Notify
) -> Scene:
    """Read the capture in the world of results: of a vanilla checkpoint, or else of the scene."""
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


def read_state(path: Path, build: Callable[[dict[str, Any]], T]) -> T:
    """Build an object from the parameters in a ``.pt`` of any stage; errors name the file."""
    payload = load_payload(path)
    try:
        return build(state_with_background(payload))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
