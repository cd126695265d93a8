# SPDX-License-Identifier: Apache-2.0
"""A run's folder: who it belongs to, and whether to start, continue, skip or refuse.

``run.json`` names the settings that decide the result. A folder whose settings differ is never
written to unless the user says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaussian_splatting.engine.checkpoint import (
    CheckpointStore,
    load_payload,
    settings_differences,
)
from sugar_utils.errors import UserError
from sugar_utils.files import (
    check_writable,
    read_json,
    remove_stale_temporaries,
    write_json_atomic,
)

RUN_FILE = "run.json"
_OWN_FOLDERS = ("tensorboard",)
_OWN_FILES = (RUN_FILE, "log.txt", "views.png", "report.html")


@dataclass
class ResumePlan:
    """What to do with a run's folder.

    Attributes:
        payload: Checkpoint to continue from; None to start anew.
        source: Its file.
        finished: The folder holds the finished run already; nothing is to be done.
    """

    payload: dict[str, Any] | None = None
    source: Path | None = None
    finished: bool = False


class RunDirectory:
    """The folder of one training run.

    Args:
        path: The folder; need not exist.
        settings: Everything that decides the result, as JSON values.
        output_flag: The flag that moves the run elsewhere, for messages.
        products: Folders elsewhere that belong to the run: where one exists, a run is there.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        output_flag: str = "--output_dir",
        products: tuple[Path, ...] = (),
    ) -> None:
        self.path = path
        self.settings = settings
        self._output_flag = output_flag
        self._products = products

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def pictures(self) -> Path:
        """Photograph, render, depth and normals of a few views, when the run is over."""
        return self.path / "views.png"

    @property
    def log(self) -> Path:
        """Plain-text log."""
        return self.path / "log.txt"

    def plan(
        self, resume: str, overwrite: bool, final: int, notify: Callable[[str], None]
    ) -> ResumePlan:
        """Decide what to do, without writing anything but the removal of an overwritten run.

        Args:
            resume: ``"auto"``, ``"none"``, or a checkpoint file or run folder to continue from.
            overwrite: Whether a run in the folder may be removed.
            final: Last iteration of the run.
            notify: Told what was skipped or ignored.

        Raises:
            UserError: If the folder holds another run, or the checkpoint cannot be used.
        """
        if resume not in ("auto", "none"):
            return self._explicit(Path(resume), final, notify)
        check_writable(self.path)
        for folder in (self.path, *self._products):
            remove_stale_temporaries(folder, nested=True)
        if overwrite and (resume == "none" or self._differences() or not self._recorded()):
            self._clear()
            return ResumePlan()
        if not self._occupied():
            return ResumePlan()
        differences = self._differences()
        if differences:
            raise UserError(
                f"{self.path} holds a run with other settings ({'; '.join(differences)}); choose "
                f"another {self._output_flag}, or replace it with --overwrite True"
            )
        if resume == "none":
            raise UserError(
                f"{self.path} holds a run already and --resume none does not continue it; choose "
                f"another {self._output_flag}, or replace it with --overwrite True"
            )
        return self._latest(final, notify)

    def record(self, status: str, **extra: Any) -> None:
        """Write ``run.json``: settings, and how far the run is."""
        write_json_atomic(
            self.path / RUN_FILE, {"status": status, "settings": self.settings, **extra}
        )

    def timings(self) -> dict[str, dict[str, float]]:
        """Seconds and peak bytes of each phase, of the processes that ended in good order."""
        return (self._recorded() or {}).get("timings", {})

    def _explicit(self, source: Path, final: int, notify: Callable[[str], None]) -> ResumePlan:
        if source.is_dir():
            # The folder of a vanilla run holds its checkpoints one floor down.
            nested = source / self.path.name
            source = nested if nested.is_dir() else source
            found = CheckpointStore(source).latest_valid(notify)
            if found is None:
                raise UserError(f"--resume {source}: no usable checkpoint in this folder")
            source, payload = found
        else:
            payload = load_payload(source)
        saved = payload.get("resume", {}).get("settings", {})
        if not saved:
            notify(f"{source} does not tell the settings it was made with")
        for line in settings_differences(saved, self.settings) if saved else ():
            notify(f"continuing with another setting than the checkpoint's: {line}")
        if payload["iteration"] >= final:
            raise UserError(
                f"--resume {source}: it is of iteration {payload['iteration']} and the run ends at "
                f"{final}; nothing is left to train"
            )
        check_writable(self.path)
        if self._occupied() and source.resolve().parent != self.path.resolve():
            raise UserError(
                f"{self.path} holds a run already; choose another {self._output_flag} for the "
                f"continuation of {source}"
            )
        return ResumePlan(payload=payload, source=source)

    def _latest(self, final: int, notify: Callable[[str], None]) -> ResumePlan:
        found = CheckpointStore(self.path).latest_valid(notify)
        if found is None:
            return ResumePlan()
        source, payload = found
        # Left behind where somebody continued an earlier checkpoint with other settings.
        saved = payload["resume"].get("settings", {})
        differences = settings_differences(saved, self.settings)
        if differences:
            raise UserError(
                f"{source} was made with other settings ({'; '.join(differences)}); remove it, or "
                "name the checkpoint to continue from with --resume"
            )
        if payload["iteration"] >= final:
            return ResumePlan(payload=payload, source=source, finished=True)
        return ResumePlan(payload=payload, source=source)

    def _recorded(self) -> dict[str, Any] | None:
        path = self.path / RUN_FILE
        if not path.is_file():
            return None
        try:
            recorded = read_json(path)
        except UserError:
            return None
        return recorded if isinstance(recorded, dict) else None

    def _occupied(self) -> bool:
        if self._recorded() is not None or any(self.path.glob("[0-9]*.pt")):
            return True
        return any(folder.exists() for folder in self._products)

    def _differences(self) -> list[str]:
        if not self._occupied():
            return []
        recorded = self._recorded()
        if recorded is None:
            return ["made by another program: it has results but no run.json"]
        return settings_differences(recorded.get("settings", {}), self.settings)

    def _clear(self) -> None:
        for checkpoint in self.path.glob("[0-9]*.pt"):
            _remove(checkpoint)
        for folder in (*(self.path / name for name in _OWN_FOLDERS), *self._products):
            shutil.rmtree(folder, ignore_errors=True)
        for name in _OWN_FILES:
            _remove(self.path / name)


def _remove(path: Path) -> None:
    """Delete a file that may be missing.

    Raises:
        UserError: It cannot be deleted, as when another program has it open on Windows.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot remove {path}: {error.strerror or error}; close the program that has it open"
        ) from error
