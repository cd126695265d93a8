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
from gaussian_splatting.engine.run_directory import Identity
from sugar_scene.mesh_bound import state_with_background
from sugar_trainers.capture import SugarSize
from sugar_utils import files as storage
from sugar_utils.errors import Notify, UserError
from sugar_utils.schemas import FileName, ResultNote, conform, read_checked

_REPLACES = "replaces"
T = TypeVar("T")


def note_path(result: Path) -> Path:
    return result.with_suffix(".json")


def read_note(files: Sequence[Path]) -> tuple[dict[str, Any], bool]:
    """The note that belongs to the files that are there, and whether they belong together."""
    path = note_path(files[-1])
    note = read_checked(path, ResultNote) if path.is_file() else {}
    replaced = note.get(_REPLACES)
    digests = note.get("files")
    if not isinstance(replaced, dict) or not isinstance(digests, dict):
        return note, True
    found = [file for file in files if file.is_file()]
    new = [storage.file_digest(file) == digests.get(file.name) for file in found]
    return (note, all(new) and len(found) == len(files)) if any(new) else (replaced, True)


def is_finished(files: Sequence[Path], identity: Identity, overwrite: bool, flag: str) -> bool:
    if not files[-1].exists():
        return False
    note, whole = read_note(files)
    differences = identity.differences(note)
    if note and not differences:
        return whole and all(file.is_file() for file in files)
    if overwrite:
        return False
    why = f"was made with other settings or inputs ({'; '.join(differences)})"
    raise UserError(
        f"{files[-1]} exists and {why if note else 'has no settings beside it'}; pass --overwrite "
        f"True to replace it, or another {flag}"
    )


def alone_with(result: Path, flag: str) -> contextlib.AbstractContextManager[None]:
    """A context in which no other process makes the same result."""
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
        enter = stack.enter_context
        temporary = {file: enter(storage.atomic_path(file)) for file in reversed(files)}
        yield temporary
        digests = {file.name: storage.file_digest(temporary[file]) for file in files}
        note = {**identity.record(), "result": dict(result()), "files": digests}
        storage.write_json_atomic(note_path(last), {**note, _REPLACES: old} if replaces else note)
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
    scene: FileName | None = None
    checkpoint: FileName | None = None


@dataclass(frozen=True)
class Capture:
    """What results were made from, as far as it is known."""

    scene: Path | None = None
    # The vanilla checkpoint whose cameras say where the world lies; None if the scene's own do.
    checkpoint: Path | None = None


def capture_of(
    results: Sequence[Path], scene: Path | None = None, checkpoint: Path | None = None
) -> Capture:
    """The folders that the user named, completed by what the results themselves tell.

    A vanilla checkpoint has its own cameras; the other stages have records of what they read.
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
    content: Any = storage.read_json(record)
    found = content.get("sources") if isinstance(content, dict) else None
    advice = "pass the scene as -s and the vanilla checkpoint as -c"
    sources = conform(found or {}, _Sources, f"{record}, sources", advice)
    scene, checkpoint = (p and Path(p) for p in (sources.scene, sources.checkpoint))
    there = checkpoint and (checkpoint.is_file() or (checkpoint / "cameras.json").is_file())
    return Capture(scene if scene and scene.is_dir() else None, checkpoint if there else None)


def scene_of(
    scene_path: Path, checkpoint_path: Path | None, size: SugarSize, notify: Notify
) -> Scene:
    """Cameras in the world of the results: of a vanilla checkpoint, or of the scene without one."""
    if checkpoint_path is None:
        return load_scene(scene_path, size_rule=size, notify=notify)
    checkpoint = load_reference_checkpoint(checkpoint_path, None, notify)
    how = {"size_rule": size, "images_dir": checkpoint.images_dir, "require_images": False}
    return load_scene_for_checkpoint(scene_path, checkpoint, **how, notify=notify)


def read_state(path: Path, build: Callable[[dict[str, Any]], T]) -> T:
    """What a function makes of the parameters in a ``.pt`` of any stage; errors name the file."""
    payload = load_payload(path)
    try:
        return build(state_with_background(payload))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
