# SPDX-License-Identifier: Apache-2.0
"""A run that is finished: called again with the same flags and inputs, it has nothing to do.

Each stage can tell that its result is there, but has to read the scene for that. The whole run
notes the size and the time of every file that it read and wrote, which are compared at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sugar_capture.scene_folder import scene_root
from sugar_extractors.outputs.result_photographs import read_photographs
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.plan import result_folder
from sugar_utils import __version__
from sugar_utils.errors import UserError
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.schemas import conform
from sugar_utils.settings import with_flags

FINISHED_FILE = "finished.json"
_WITHOUT_EFFECT = ("verbose", "config")  # flags that change no result

FileState = tuple[int, int]  # size in bytes, and time of the last change in nanoseconds


class _Notes(msgspec.Struct):
    """``finished.json``."""

    flags: dict[str, str]
    inputs: dict[str, FileState]
    outputs: dict[str, FileState]
    result: dict[str, Any]


class FinishedRun:
    """The notes of a run in its folder of results; the commands ask it first, and tell it last.

    Args:
        args: Flags of the run.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._root = scene_root(args.scene_path)
        self._folder = result_folder(with_flags(args, scene_path=self._root))
        self._path = self._folder / FINISHED_FILE
        self._args = args
        values = {name: value for name, value in vars(args).items() if name not in _WITHOUT_EFFECT}
        self._flags = {name: repr(value) for name, value in sorted(values.items())}
        self._flags["version"] = __version__
        self._inputs = self._input_states()

    def result(self) -> PipelineResult | None:
        """Return the result of an earlier process; None unless all is as that process left it."""
        if self._args.overwrite or self._args.resume != "auto":
            return None
        with contextlib.suppress(UserError):
            if not self._path.is_file():
                return None
            notes = conform(read_json(self._path), _Notes, self._path)
            if notes.flags != self._flags or notes.inputs != self._inputs:
                return None
            if _states(map(Path, notes.outputs)) != notes.outputs:
                return None
            return _from_builtins(notes.result)
        return None

    def note(self, result: PipelineResult) -> None:
        """Note the end of a run, unless it is not sure that all is known that it was made of."""
        if not result.files:
            return
        inputs = self._input_states()
        has_changed = any(inputs.get(path) != state for path, state in self._inputs.items())
        if has_changed or not self._holds_all_images():
            return
        written = [path for record in result.records for path in record.outputs]
        files = [*written, *result.files]
        if result.report is not None:
            files.append(result.report)
        notes = _Notes(self._flags, inputs, _states(files), _to_builtins(result))
        # Without the notes the stages look for themselves.
        with contextlib.suppress(UserError):
            write_json_atomic(self._path, msgspec.to_builtins(notes))

    def _holds_all_images(self) -> bool:
        """Return whether the images lie in the scene folder, and not where a model names them."""
        root = self._root.resolve()
        paths = [camera.image_path for camera in read_photographs(self._folder)]
        return all(path is not None and path.resolve().is_relative_to(root) for path in paths)

    def _input_states(self) -> dict[str, FileState]:
        """Return the states of all files that flags name, and of those in folders they name."""
        output = Path(self._args.output_dir).resolve()
        visited = {output}
        files = list(_files_in(self._root, visited))
        for value in vars(self._args).values():
            # An empty word would be the folder that the program was started in.
            if value and isinstance(value, str | Path):
                files += _files_in(Path(value), visited)
        return _states(files)


def _files_in(path: Path, visited: set[Path]) -> Iterator[Path]:
    """Yield a file, or all files in a folder and its folders, links followed.

    Args:
        visited: Resolved folders that are left out; those that are looked into are added.
    """
    if path.is_file():
        yield path
        return
    for parent, folders, names in os.walk(path, followlinks=True):
        resolved = Path(parent).resolve()
        if resolved in visited:
            folders.clear()
            continue
        visited.add(resolved)
        for name in names:
            yield Path(parent, name)


def _states(files: Iterable[Path]) -> dict[str, FileState]:
    """Return the states of files by path; those that do not exist are left out."""
    states = {}
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            states[str(path)] = (status.st_size, status.st_mtime_ns)
    return states


def _to_builtins(result: PipelineResult) -> dict[str, Any]:
    def plain(value: object) -> object:
        return value.item() if isinstance(value, np.generic) else str(value)

    return msgspec.to_builtins(result, enc_hook=plain)


def _from_builtins(values: dict[str, Any]) -> PipelineResult:
    def typed(kind: type, value: Any) -> Any:
        return value if kind is object else kind(value)

    try:
        return msgspec.convert(values, PipelineResult, dec_hook=typed)
    except msgspec.ValidationError as error:
        raise UserError(f"notes of another version: {error}") from error
