# SPDX-License-Identifier: Apache-2.0
"""Recipes: inputs and settings of results, and whether a result is current.

A :class:`Recipe` has the settings that decide a result and digests of what is read for it. Its
record stands in the note beside the result, in ``run.json`` or in a checkpoint.

A result that is replaced stays until the new one is complete on the disk. Several files cannot be
renamed at once, so while they are, the note holds the digests of the new files and the note of the
old ones: whatever moment a process is killed in, the next one can tell which of the two is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sugar_utils import files as storage
from sugar_utils.errors import CHANGED_TO, OtherSettings, UserError, shortened
from sugar_utils.schemas import ResultNote, read_checked

_REPLACES = "replaces"
_FILES = "files"


def digest_of(*parts: object) -> str:
    """Return a short digest of JSON values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Recipe:
    """Settings and inputs of a result, as JSON values; compared with those in its record."""

    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)  # digests
    sources: dict[str, Any] = field(default_factory=dict)  # paths, which do not decide the result

    def __post_init__(self) -> None:
        for name in ("settings", "inputs", "sources"):
            object.__setattr__(self, name, storage.json_values(getattr(self, name)))

    @property
    def key(self) -> str:
        """Short text that changes with the settings and the inputs, for names of folders."""
        return digest_of(self.settings, self.inputs)

    def record(self) -> dict[str, Any]:
        """All of it, for the note of a result."""
        return {"settings": self.settings, "inputs": self.inputs, "sources": self.sources}

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """One line for every setting and kind of input that is not as recorded."""
        settings = recorded.get("settings")
        inputs = recorded.get("inputs")
        return [
            *settings_differences(settings if isinstance(settings, Mapping) else {}, self.settings),
            *input_differences(inputs if isinstance(inputs, Mapping) else {}, self.inputs),
        ]

    def write(self, note: Path, files: Iterable[Path] = (), **values: object) -> None:
        """Write the note of a result that is complete.

        Args:
            note: The file.
            files: Of the result; the note has their digests.
            values: What else the note says.
        """
        record: dict[str, object] = {**self.record(), **values}
        digests = {}
        for path in files:
            digests[storage.relative_path(path, note.parent)] = storage.file_digest(path)
        if digests:
            record[_FILES] = digests
        storage.write_json_atomic(note, record)

    def is_current(self, note: Path, files: Iterable[Path] = ()) -> bool:
        """Whether a result is there that was made by this recipe, with all files.

        Files of which the note has digests must be as they were written, whether they are named
        here or not. A note that cannot be read is no note.
        """
        recorded: object = None
        with contextlib.suppress(UserError):
            recorded = storage.read_json(note) if note.is_file() else None
        if not isinstance(recorded, dict) or "settings" not in recorded:
            return False
        digests = recorded.get(_FILES, {})
        if self.differences(recorded) or not isinstance(digests, dict):
            return False
        for name, digest in digests.items():
            path = note.parent / str(name)
            if not path.is_file() or storage.file_digest(path) != digest:
                return False
        return all(path.is_file() for path in files)

    def is_finished(self, files: Sequence[Path], overwrite: bool, flag: str) -> bool:
        """Return whether a result is there that :meth:`publish` wrote by this recipe.

        Args:
            files: Of the result; the note is beside the last.
            overwrite: Whether another result may be replaced.
            flag: That chooses another place, for the error.

        Raises:
            UserError: There is another one, and it may not be overwritten.
        """
        if not files[-1].exists():
            return False
        note, belong_together = read_note(files)
        differences = self.differences(note)
        if note and not differences:
            return belong_together and all(file.is_file() for file in files)
        if overwrite:
            return False
        why = f"was made with other settings or inputs ({'; '.join(differences)})"
        raise OtherSettings(
            f"{files[-1]} exists and {why if note else 'has no settings beside it'}; pass "
            f"--overwrite True to replace it, or another {flag}",
            files[-1].parent,
            differences,
            flag,
        )

    @contextlib.contextmanager
    def publish(
        self, files: Sequence[Path], result: Callable[[], Mapping[str, Any]]
    ) -> Iterator[dict[Path, Path]]:
        """Write the files of a result, and its note; an earlier result is there until the end.

        Args:
            files: Of the result.
            result: Called once they are written; figures for the note.
        """
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
            note = {**self.record(), "result": dict(result()), "files": digests}
            first_note = {**note, _REPLACES: old} if replaces else note
            storage.write_json_atomic(note_path(last), first_note)
        if not replaces:
            return
        names = old.get(_FILES)
        for name in names if isinstance(names, dict) else ():
            path = last.parent / name
            # What a note says must not lead to other results.
            if name not in digests and path.stem == last.stem and path.parent == last.parent:
                path.unlink(missing_ok=True)
        storage.write_json_atomic(note_path(last), note)


def note_path(result: Path) -> Path:
    """Return the JSON file beside a result."""
    return result.with_suffix(".json")


def read_note(files: Sequence[Path]) -> tuple[dict[str, Any], bool]:
    """Return the note of the files that exist, and whether the files belong together."""
    path = note_path(files[-1])
    note = read_checked(path, ResultNote) if path.is_file() else {}
    replaced = note.get(_REPLACES)
    digests = note.get(_FILES)
    if not isinstance(replaced, dict) or not isinstance(digests, dict):
        return note, True
    present = [file for file in files if file.is_file()]
    is_new = [storage.file_digest(file) == digests.get(file.name) for file in present]
    if not any(is_new):
        return replaced, True
    return note, all(is_new) and len(present) == len(files)


def alone_with(result: Path, flag: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other process makes the same result."""
    advice = f"wait until it ends, stop it, or choose another {flag}"
    folder = storage.check_writable(result.parent)
    return storage.exclusive(folder, advice, name=f".{result.stem}.lock")


def settings_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lines such as ``"random_seed: 0 → 1"`` for every setting that is not the same."""
    new = dict(storage.flat_items(storage.json_values(current)))
    old = dict(storage.flat_items(storage.json_values(saved)))
    absent = "(not set)"
    lines = []
    for name in dict.fromkeys([*new, *old]):
        if name not in old or name not in new or old[name] != new[name]:
            before = old.get(name, absent)
            lines.append(f"{name}: {before}{CHANGED_TO}{new.get(name, absent)}")
    return lines


def input_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Lines such as ``"photographs: a.jpg changed"`` for kinds of input that are not the same."""
    lines = []
    for kind in dict.fromkeys([*current, *saved]):
        old = saved.get(kind)
        new = current.get(kind)
        if old == new:
            continue
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            lines.append(f"{kind}: {'not recorded' if old is None else 'changed'}")
            continue
        names_by_change = {
            "changed": [name for name in new if name in old and new[name] != old[name]],
            "added": [name for name in new if name not in old],
            "gone": [name for name in old if name not in new],
        }
        parts = [f"{shortened(names)} {what}" for what, names in names_by_change.items() if names]
        lines.append(f"{kind}: {', '.join(parts)}")
    return lines
