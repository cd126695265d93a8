# SPDX-License-Identifier: Apache-2.0
"""A run that is finished: called again with the same flags and inputs, it has nothing to do.

Each stage can tell that its result is there, but has to read the scene for that. The recipe of the
whole run has its flags and the digests of all files that it read, and its note those of the files
that it wrote.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
from sugar_utils.files import file_digest, in_parallel, read_json
from sugar_utils.flags import FlagValues
from sugar_utils.recipe import Recipe

FINISHED_FILE = "finished.json"
_WITHOUT_EFFECT = ("verbose", "config")  # flags that change no result


class FinishedRun:
    """The record of a finished run in its folder of results; read first and written last.

    Args:
        flags: Of the run.
    """

    def __init__(self, flags: FlagValues) -> None:
        self._root = scene_root(flags["scene_path"])
        self._folder = result_folder(self._root, flags["output_dir"])
        self._path = self._folder / FINISHED_FILE
        self._flags = flags
        self._recipe = self._present_recipe()

    def result(self) -> PipelineResult | None:
        """Return the result of an earlier process; None unless all is as that process left it."""
        if self._flags["overwrite"] or self._flags["resume"] != "auto":
            return None
        if not self._recipe.is_current(self._path):
            return None
        with contextlib.suppress(UserError):
            return _from_builtins(read_json(self._path).get("result"))
        return None

    def note(self, result: PipelineResult) -> None:
        """Record the end of a run, unless some of its inputs may be unknown."""
        if not result.files:
            return
        recipe = self._present_recipe()
        files = recipe.inputs["files"]
        earlier_files = self._recipe.inputs["files"]
        has_changed = any(files.get(path) != digest for path, digest in earlier_files.items())
        if has_changed or not self._holds_all_images():
            return
        written = [path for record in result.records for path in record.outputs]
        outputs = [*written, *result.files]
        if result.report is not None:
            outputs.append(result.report)
        outputs = [path for path in outputs if path.is_file()]
        # Without the note the stages look for themselves.
        with contextlib.suppress(UserError):
            recipe.write(self._path, outputs, result=_to_builtins(result))

    def _holds_all_images(self) -> bool:
        """Return whether the images lie in the scene folder, and not where a model names them."""
        root = self._root.resolve()
        paths = [camera.image_path for camera in read_photographs(self._folder)]
        return all(path is not None and path.resolve().is_relative_to(root) for path in paths)

    def _present_recipe(self) -> Recipe:
        """Return the recipe with digests of all files that flags name, or in folders they name."""
        output = Path(self._flags["output_dir"]).resolve()
        visited = {output}
        files = list(_files_in(self._root, visited))
        for value in self._flags.values():
            # An empty word would be the folder that the program was started in.
            if value and isinstance(value, str | Path):
                files += _files_in(Path(value), visited)
        names = [str(path) for path in files]
        digests = in_parallel(_digest_or_none, files)
        settings = {
            name: repr(value)
            for name, value in sorted(self._flags.items())
            if name not in _WITHOUT_EFFECT
        }
        settings["version"] = __version__
        return Recipe(settings, {"files": dict(zip(names, digests, strict=True))})


def _digest_or_none(path: Path) -> str | None:
    """Return the digest of a file; None where it cannot be read."""
    with contextlib.suppress(UserError, OSError):
        return file_digest(path)
    return None


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


def _to_builtins(result: PipelineResult) -> dict[str, Any]:
    def plain(value: object) -> object:
        return value.item() if isinstance(value, np.generic) else str(value)

    return msgspec.to_builtins(result, enc_hook=plain)


def _from_builtins(values: object) -> PipelineResult:
    def typed(kind: type, value: Any) -> Any:
        return value if kind is object else kind(value)

    try:
        return msgspec.convert(values, PipelineResult, dec_hook=typed)
    except msgspec.ValidationError as error:
        raise UserError(f"notes of another version: {error}") from error
