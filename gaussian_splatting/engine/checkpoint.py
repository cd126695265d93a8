# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: written whole, verified before use, thinned out as the run goes on.

A checkpoint is ``{iteration}.pt``, a ``torch.save`` of a dictionary with the five keys that SuGaR's
own files have (``state_dict``, ``train_losses``, ``epoch``, ``iteration``,
``optimizer_state_dict``) and ``resume``, which holds what continuing bit for bit needs on top.
Tools that read SuGaR's files ignore the extra key. Everything inside is a tensor or a primitive,
so loading never executes code.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.engine.payload import check_payload
from sugar_utils.errors import UserError
from sugar_utils.files import (
    atomic_path,
    check_writable,
    remove_stale_temporaries,
    require_regular_file,
)
from sugar_utils.memory import out_of_memory

PAYLOAD_KEYS = ("state_dict", "train_losses", "epoch", "iteration", "optimizer_state_dict")
RESUME_KEY = "resume"

_DOS_DIRECTORY = 0x10
_FILE_NAME = re.compile(r"^(\d+)\.pt$")


class CheckpointStore:
    """The checkpoints of one run in one folder.

    Temporaries that killed processes left in the folder are removed at construction.

    Args:
        directory: Folder of the run; created if need be.
        keep: How many interval checkpoints to keep; None keeps all.
        milestones: Iterations whose checkpoints are always kept.
        final: Last iteration of the run; its checkpoint is always kept.

    Raises:
        UserError: The folder cannot be written to, or ``keep`` is less than 1.
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = None,
        milestones: Iterable[int] = (),
        final: int | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"--keep_checkpoints {keep}: keep at least 1 checkpoint to resume from")
        self.directory = check_writable(directory)
        self._keep = keep
        self._permanent = frozenset(milestones) | ({final} if final is not None else set())
        self._broken: set[int] = set()
        self._last_saved: int | None = None
        remove_stale_temporaries(self.directory)

    def path(self, iteration: int) -> Path:
        """File of an iteration's checkpoint, whether it exists or not."""
        return checkpoint_path(self.directory, iteration)

    def iterations(self) -> list[int]:
        """Iterations that have a file, ascending; the files may be broken."""
        matches = (_FILE_NAME.match(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def save(self, iteration: int, payload: Mapping[str, Any]) -> Path:
        """Write a checkpoint: after the call it is on the disk, complete.

        Tensors are copied to the CPU one at a time, so the device needs no extra memory.

        Args:
            iteration: The iteration just finished.
            payload: ``PAYLOAD_KEYS`` and ``"resume"``; tensors, primitives and containers of them.

        Returns:
            The file.

        Raises:
            UserError: The file cannot be written; an older file of this name stays as it was.
            TypeError: The payload holds something that loading would have to execute.
        """
        path = self.path(iteration)
        save_payload(path, payload)
        self._last_saved = iteration
        self._broken.discard(iteration)
        return path

    def load(self, path: Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
        """Read and verify a checkpoint; see ``load_payload``."""
        return load_payload(path, map_location)

    def latest_valid(
        self,
        notify: Callable[[str], None],
        map_location: torch.device | str = "cpu",
    ) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that a run can continue from.

        Args:
            notify: Told one line about every newer file that is skipped, and why.
            map_location: Device for the tensors.

        Returns:
            File and payload; None if there is none.
        """
        for iteration in reversed(self.iterations()):
            path = self.path(iteration)
            try:
                payload = load_numbered(path, map_location)
            except UserError as error:
                self._broken.add(iteration)
                notify(f"{error}; the checkpoint before it is tried")
                continue
            if not isinstance(payload.get(RESUME_KEY), dict) or not payload["optimizer_state_dict"]:
                notify(f"{path}: has no data to resume from; the checkpoint before it is tried")
                continue
            return path, payload
        return None

    def prune(self) -> list[Path]:
        """Remove interval checkpoints beyond the newest ``keep``.

        Milestones, the final checkpoint and the one saved last always stay. Files found broken and
        files beyond the one saved last (this run went back to an earlier one, perhaps because they
        are broken) neither count nor are touched, so they cannot push out good ones.

        Returns:
            The files removed.
        """
        if self._keep is None:
            return []
        interval = [
            iteration
            for iteration in self.iterations()
            if iteration not in self._permanent
            and iteration not in self._broken
            and (self._last_saved is None or iteration <= self._last_saved)
        ]
        removed = []
        for iteration in interval[: -self._keep]:
            if iteration == self._last_saved:
                continue
            path = self.path(iteration)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                # Open in another program (Windows); the next prune gets it.
                continue
            removed.append(path)
        return removed


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """File of an iteration's checkpoint in a run's folder."""
    return directory / f"{iteration}.pt"


def save_payload(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a dictionary of tensors and primitives so that it appears complete or not at all.

    Raises:
        UserError: The file cannot be written.
        TypeError: A value is neither tensor nor primitive; the message gives its place.
    """
    portable = to_portable(payload)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        writer = _ErrorKeeper(file)
        try:
            torch.save(portable, writer)
        except RuntimeError as error:
            # The archive writer hides the reason (disk full) behind an error of its own.
            raise (writer.error or error) from None


def load_payload(path: Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint after verifying the checksum of every part of it.

    Files of other programs, which have no ``"resume"``, are read as well.

    Args:
        path: The ``.pt`` file.
        map_location: Device for the tensors.

    Returns:
        The payload; it has all of ``PAYLOAD_KEYS``, and they are what they should be.

    Raises:
        UserError: The file is missing, truncated, damaged, would execute code, is no checkpoint or
            one that makes no sense.
    """
    path = require_regular_file(path, missing_ok=True)
    _verify_archive(path)
    try:
        with warnings.catch_warnings():
            # Of storages that a file of somebody else may use; what is wrong with it is said below.
            warnings.simplefilter("ignore")
            payload = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds objects other than tensors and primitives and is not loaded, because "
            "loading them can execute code; use a checkpoint that this program wrote"
        ) from error
    except Exception as error:
        # Whatever else an unpickler trips over is the file's fault; a lack of memory is not.
        if out_of_memory(error):
            raise
        raise _damaged(path, error) from error
    missing = [key for key in PAYLOAD_KEYS if not isinstance(payload, dict) or key not in payload]
    if missing:
        raise UserError(
            f"{path}: not a training checkpoint ({', '.join(missing)} missing); "
            "pass a .pt file that a training run wrote"
        )
    check_payload(path, payload)
    return payload


def load_numbered(path: Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """As :func:`load_payload`; where the name of the file is a number, it is the iteration.

    Raises:
        UserError: As there, or the file says that it is of another iteration.
    """
    payload = load_payload(path, map_location)
    named = _FILE_NAME.match(path.name)
    if named and payload["iteration"] != int(named.group(1)):
        raise UserError(
            f"{path}: holds iteration {payload['iteration']}, not that of its name; rename it, or "
            "use another checkpoint"
        )
    return payload


def to_portable(value: Any, place: str = "payload") -> Any:
    """Copy nested containers with every tensor detached, on the CPU and owning just its memory.

    Args:
        value: Tensors, ``None``, booleans, numbers, strings, bytes, and dictionaries, lists and
            tuples of them. Subclasses (enumerations, numpy floats) become the plain type.
        place: Name of ``value`` in error messages.

    Returns:
        The copy; tensors that already fit share their memory with the original.

    Raises:
        TypeError: Something else was found.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        # Saving a view would write all of the storage that it looks at.
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str, bytes):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {
            to_portable(key, f"a key of {place}"): to_portable(item, f"{place}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [to_portable(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{place} is a {type(value).__name__}; checkpoints hold tensors and primitives")


class _ErrorKeeper(io.RawIOBase):
    """Passes writes on and remembers why one failed."""

    def __init__(self, file: io.BufferedWriter) -> None:
        super().__init__()
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _damaged(path: Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{path}: the checkpoint is damaged ({reason}); use an earlier one")


def _verify_archive(path: Path) -> None:
    """Check the CRC-32 of every record; ``torch.load`` itself does not."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            # torch.load takes a record with this attribute for a folder, reads nothing and returns
            # whatever was in memory.
            folders = [i.filename for i in archive.infolist() if i.external_attr & _DOS_DIRECTORY]
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); check the path"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # Whatever a parser trips over in a damaged file (zipfile raises half a dozen kinds), the
        # fault is the file's.
        raise _damaged(path, error) from error
    if bad is not None or folders:
        fault = f"entry of {folders[0]}" if bad is None else f"checksum of {bad}"
        raise UserError(f"{path}: the checkpoint is damaged ({fault} is wrong); use an earlier one")
