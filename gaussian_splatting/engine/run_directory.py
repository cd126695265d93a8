# SPDX-License-Identifier: Apache-2.0
"""A run's folder: who it belongs to, and whether to start, continue, skip or refuse.

``run.json`` names what decides the result: settings, and digests of what was read. Where the user
wants another run replaced, that stays until the new one, which keeps its log apart, has a
checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaussian_splatting.engine.checkpoint import CheckpointStore, load_numbered
from gaussian_splatting.engine.state_schema import PayloadCheck
from gaussian_splatting.scenes.reference_layout import RUN_FILE
from sugar_utils import files as storage
from sugar_utils.errors import Notify, OtherSettings, UserError, explained
from sugar_utils.recipe import Recipe
from sugar_utils.schemas import RunRecord, read_checked

_LOG = "log.txt"
_EVENTS = "tensorboard"
_RESULT_FILES = ("views.png", "worst.png", "report.html")
_STAGING = ".replacing"
_OBSOLETE = "obsolete"


@dataclass
class ResumePlan:
    """Decision about a run's folder: start anew, continue, or do nothing."""

    payload: dict[str, Any] | None = None  # checkpoint to continue from; None to start anew
    source: Path | None = None
    finished: bool = False


class RunDirectory:
    """The folder of one run: its record, log, curves and identity.

    Options make one, the runner plans with it, and the loop records the status in it.

    Args:
        identity: Of the run that is to be in the folder.
        output_flag: Flag that chooses the folder, for messages.
        products: Folders elsewhere that belong to the run.
        check: What a checkpoint of the run must hold.
    """

    def __init__(
        self,
        path: Path,
        identity: Recipe,
        output_flag: str = "--output_dir",
        products: tuple[Path, ...] = (),
        check: PayloadCheck | None = None,
    ) -> None:
        self.path = path
        self.identity = identity
        self.replaces = False
        self.output_flag = output_flag
        self._products = products
        self.check = check

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files."""
        return self._folder / _EVENTS

    @property
    def log(self) -> Path:
        """File of the log."""
        return self._folder / _LOG

    @property
    def _folder(self) -> Path:
        return self.path / _STAGING if self.replaces else self.path

    def plan(self, resume: str, overwrite: bool, final: int, notify: Notify) -> ResumePlan:
        """Decide between start, continuation and refusal; existing files stay unchanged.

        Args:
            resume: ``"auto"``, ``"none"``, or a checkpoint file or run folder to continue from.
        """
        self._remove_obsolete()
        shutil.rmtree(self.path / _STAGING, ignore_errors=True)
        if resume not in ("auto", "none"):
            return self._explicit(Path(resume), final, notify)
        storage.check_writable(self.path)
        for folder in (self.path, *self._products):
            storage.remove_stale_temporaries(folder, nested=True)
        if not self._occupied():
            return ResumePlan()
        differences = self._differences()
        if overwrite and (resume == "none" or differences or not self._recorded()):
            self.replaces = True
            return ResumePlan()
        if differences:
            raise OtherSettings(
                f"{self.path} holds a run of other settings or inputs ({'; '.join(differences)}); "
                f"choose another {self.output_flag}, or replace it with --overwrite True",
                self.path,
                differences,
                self.output_flag,
            )
        if resume == "none":
            raise UserError(
                f"{self.path} holds a run already and --resume none does not continue it; choose "
                f"another {self.output_flag}, or replace it with --overwrite True"
            )
        return self._latest(final, notify)

    def record(self, status: str, **extra: object) -> None:
        """Write ``run.json``; while another run is to be replaced, its own stays."""
        if not self.replaces:
            record = {"status": status, **self.identity.record(), **extra}
            storage.write_json_atomic(self.path / RUN_FILE, record)

    def check_present(self) -> None:
        """Raise ``UserError`` where the run's folder was removed meanwhile."""
        # A run of another program, which is to be replaced, may have no record.
        if not (self.log if self.replaces else self.path / RUN_FILE).is_file():
            raise UserError(
                f"{self.path} was removed while the run was going on, with all that was in it; "
                "start the run again"
            )

    def replace_other(self, checkpoint: Path) -> None:
        """Remove the run that was in the folder before; this one has a checkpoint now.

        A process killed meanwhile leaves the old run, or the new one and a list of what is still
        to be removed. Nothing may have the log or the event files open.
        """
        staged = self.path / _STAGING
        self.replaces = False
        old = [path.name for path in self._checkpoints() if path != checkpoint]
        old += [name for name in _RESULT_FILES if (self.path / name).exists()]
        old += [f"{_EVENTS}/{path.name}" for path in (self.path / _EVENTS).glob("*")]
        self.record("running", **{_OBSOLETE: old})
        self._remove_obsolete()
        # Log and curves are not worth the run: they may have been deleted, or be open elsewhere.
        with contextlib.suppress(OSError):
            for source in (staged / _LOG, *(staged / _EVENTS).glob("*")):
                target = self.path / source.relative_to(staged)
                target.parent.mkdir(exist_ok=True)
                os.replace(source, target)
            shutil.rmtree(staged)

    def _remove_obsolete(self) -> None:
        recorded = self._recorded() or {}
        names = recorded.pop(_OBSOLETE, None)
        if names is None:
            return
        for path in (self.path / name for name in names):
            # What a file says must not lead out of the folder.
            if path.parent not in (self.path, self.path / _EVENTS) or not path.is_file():
                continue
            with explained(f"cannot remove {path}:", "close the program that has it open"):
                path.unlink(missing_ok=True)
        for folder in self._products:
            shutil.rmtree(folder, ignore_errors=True)
        storage.write_json_atomic(self.path / RUN_FILE, recorded)

    def timings(self) -> dict[str, dict[str, float]]:
        """Seconds and peak bytes of each phase, of the processes that ended in good order."""
        timings = (self._recorded() or {}).get("timings")
        return timings if isinstance(timings, dict) else {}

    def _explicit(self, source: Path, final: int, notify: Notify) -> ResumePlan:
        if source.is_dir():
            # The folder of a vanilla run holds its checkpoints one floor down.
            nested = source / self.path.name
            source = nested if nested.is_dir() else source
            latest = CheckpointStore(source, check=self.check).latest_valid(notify)
            if latest is None:
                raise UserError(f"--resume {source}: no usable checkpoint in this folder")
            source, payload = latest
        else:
            payload = load_numbered(source, self.check)
        saved = payload.get("resume") or {}
        if not saved.get("settings"):
            notify(f"{source} does not tell the settings it was made with")
        for line in self.identity.differences(saved) if saved.get("settings") else ():
            notify(f"continuing with another setting than the checkpoint's: {line}")
        if payload["iteration"] >= final:
            raise UserError(
                f"--resume {source}: it is of iteration {payload['iteration']} and the run ends at "
                f"{final}; nothing is left to train"
            )
        storage.check_writable(self.path)
        if self._occupied() and source.resolve().parent != self.path.resolve():
            raise UserError(
                f"{self.path} holds a run already; choose another {self.output_flag} for the "
                f"continuation of {source}"
            )
        return ResumePlan(payload=payload, source=source)

    def _latest(self, final: int, notify: Notify) -> ResumePlan:
        latest = CheckpointStore(self.path, check=self.check).latest_valid(notify)
        if latest is None:
            return ResumePlan()
        source, payload = latest
        # Left behind where an earlier checkpoint was continued with other settings.
        differences = self.identity.differences(payload["resume"])
        if differences:
            raise UserError(
                f"{source} was made with other settings or inputs ({'; '.join(differences)}); "
                "remove it, or name the checkpoint to continue from with --resume"
            )
        return ResumePlan(payload, source, finished=payload["iteration"] >= final)

    def _recorded(self) -> dict[str, Any] | None:
        with contextlib.suppress(UserError):
            if (self.path / RUN_FILE).is_file():
                return read_checked(self.path / RUN_FILE, RunRecord)
        return None

    def _occupied(self) -> bool:
        results = any(folder.exists() for folder in self._products)
        return results or self._recorded() is not None or bool(self._checkpoints())

    def _differences(self) -> list[str]:
        recorded = self._recorded()
        if recorded is not None:
            return self.identity.differences(recorded)
        if (self.path / RUN_FILE).exists():
            return [f"its {RUN_FILE} is damaged: go on with --resume {self.path}"]
        return ["made by another program: it has results but no run.json"]

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("[0-9]*.pt"))
