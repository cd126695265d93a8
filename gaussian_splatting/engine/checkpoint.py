# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: written whole, verified and checked before use, thinned out.

A checkpoint is ``{iteration}.pt``, a ``torch.save`` of a dictionary with the five keys that SuGaR's
own files have (``state_dict``, ``train_losses``, ``epoch``, ``iteration``,
``optimizer_state_dict``) and ``resume``, which holds what continuing bit for bit needs on top.
Everything inside is a tensor or a primitive, so loading never executes code. What is not known by
name is let through: tools may keep more in a file than training needs.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gaussian_splatting.engine.state_schema import PayloadCheck
from gaussian_splatting.optim.adam_steps import MOMENTS
from sugar_utils import files
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.memory import out_of_memory
from sugar_utils.schemas import MAX_DEPTH, Count, is_deeper

PAYLOAD_KEYS = ("state_dict", "train_losses", "epoch", "iteration", "optimizer_state_dict")
_DOS_DIRECTORY = 0x10
_FILE_NAME = re.compile(r"^(\d+)\.pt$")
_FAULTS = (msgspec.ValidationError, ValueError, AttributeError, TypeError)
"""The last two where a tensor stands in for a container and answers to half of its methods."""


class CheckpointStore:
    """The checkpoints of one run in one folder; temporaries of killed processes are removed.

    Of interval checkpoints ``keep`` stay, all if None.
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = None,
        milestones: Iterable[int] = (),
        final: int | None = None,
        check: PayloadCheck | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"--keep_checkpoints {keep}: keep at least 1 checkpoint to resume from")
        self.directory = files.check_writable(directory)
        self._keep = keep
        self._check = check
        self._permanent = frozenset(milestones) | ({final} if final is not None else set())
        self._broken: set[int] = set()
        self._last_saved: int | None = None
        files.remove_stale_temporaries(self.directory)

    def iterations(self) -> list[int]:
        """Iterations that have a file, ascending; the files may be broken."""
        matches = (_FILE_NAME.match(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def save(self, iteration: int, payload: Mapping[str, Any]) -> Path:
        """Write the checkpoint of an iteration, complete or not at all."""
        path = checkpoint_path(self.directory, iteration)
        save_payload(path, payload)
        self._last_saved = iteration
        self._broken.discard(iteration)
        return path

    def latest_valid(self, notify: Notify) -> tuple[Path, dict[str, Any]] | None:
        """File and contents of the newest checkpoint to continue from; None without one."""
        for iteration in reversed(self.iterations()):
            path = checkpoint_path(self.directory, iteration)
            try:
                payload = load_numbered(path, self._check)
            except UserError as error:
                self._broken.add(iteration)
                notify(f"{error}; the checkpoint before it is tried")
                continue
            if not isinstance(payload.get("resume"), dict) or not payload["optimizer_state_dict"]:
                notify(f"{path}: has no data to resume from; the checkpoint before it is tried")
                continue
            return path, payload
        return None

    def prune(self) -> None:
        """Remove interval checkpoints beyond the newest ``keep``.

        Milestones, the final checkpoint and the one saved last always stay. Files found broken and
        files beyond the one saved last (this run went back to an earlier one, perhaps because they
        are broken) neither count nor are touched, so they cannot push out good ones.
        """
        if self._keep is None:
            return
        spared = self._permanent | self._broken
        last = math.inf if self._last_saved is None else self._last_saved
        interval = [i for i in self.iterations() if i not in spared and i <= last]
        for iteration in interval[: -self._keep]:
            # Open in another program (Windows): the next prune gets it.
            with contextlib.suppress(OSError):
                if iteration != self._last_saved:
                    checkpoint_path(self.directory, iteration).unlink(missing_ok=True)


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """File of an iteration's checkpoint."""
    return directory / f"{iteration}.pt"


def save_payload(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a dictionary of tensors and primitives, complete or not at all."""
    portable = to_portable(payload)
    with files.atomic_path(path) as temporary, temporary.open("wb") as file:
        writer = _ErrorKeeper(file)
        try:
            torch.save(portable, writer)  # pyright: ignore[reportArgumentType]  a raw stream will do
        except RuntimeError as error:
            # The archive writer hides the reason (disk full) behind an error of its own.
            raise (writer.error or error) from None


def load_payload(path: Path, check: PayloadCheck | None = None) -> dict[str, Any]:
    """Read a checkpoint of any program after verifying the checksum of every part of it.

    Args:
        check: What its reader knows of it beyond that.
    """
    path = files.require_regular_file(path, missing_ok=True)
    _verify_archive(path)
    try:
        with warnings.catch_warnings():
            # Storage types that foreign files may use; the error is raised below.
            warnings.simplefilter("ignore")
            payload = torch.load(path, map_location="cpu", weights_only=True)
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
    check_payload(path, payload, check)
    return payload


def load_numbered(path: Path, check: PayloadCheck | None = None) -> dict[str, Any]:
    """Call :func:`load_payload`; where the name of the file is a number, it is the iteration."""
    payload = load_payload(path, check)
    named = _FILE_NAME.match(path.name)
    if named and payload["iteration"] != int(named.group(1)):
        raise UserError(
            f"{path}: holds iteration {payload['iteration']}, not that of its name; rename it, or "
            "use another checkpoint"
        )
    return payload


def packed_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the state of a stage: tensors under ``"stage"``, primitives beside it."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    primitives = {name: value for name, value in state.items() if name not in tensors}
    return {"stage": tensors, **primitives}


def unpacked_state(resume: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`packed_state`."""
    primitives = {name: value for name, value in resume.items() if name != "stage"}
    return {**primitives, **resume.get("stage", {})}


def to_portable(value: object, place: str = "payload") -> Any:
    """Copy nested containers with every tensor detached, on the CPU and owning just its memory.

    Subclasses of numbers and strings (enumerations, numpy floats) become the plain type.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        # Saving a view would write all of the storage that it looks at.
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor
    if value is None or isinstance(value, bool):
        return value
    for plain_type in (int, float, str, bytes):
        if type(value) is plain_type:
            return value
        if isinstance(value, plain_type):
            return plain_type(value)  # pyright: ignore[reportArgumentType]  it is of that type
    if isinstance(value, Mapping):
        keys = [to_portable(key, f"a key of {place}") for key in value]
        items = [to_portable(item, f"{place}[{key!r}]") for key, item in value.items()]
        return dict(zip(keys, items, strict=True))
    if isinstance(value, (list, tuple)):
        items = [to_portable(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{place} is a {type(value).__name__}; checkpoints hold tensors and primitives")


class _ErrorKeeper(io.RawIOBase):
    """Passes writes on and remembers why one failed."""

    def __init__(self, file: io.BufferedWriter) -> None:
        super().__init__()
        self._file = file
        self.flush = file.flush
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _damaged(path: Path, error: BaseException) -> UserError:
    reason = reason_of(error)
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
        raise UserError(f"{path}: cannot be read ({reason_of(error)}); check the path") from error
    except MemoryError:
        raise
    except Exception as error:
        # Whatever a parser trips over in a damaged file (zipfile raises half a dozen kinds), the
        # fault is the file's.
        raise _damaged(path, error) from error
    if bad is not None or folders:
        fault = f"entry of {folders[0]}" if bad is None else f"checksum of {bad}"
        raise UserError(f"{path}: the checkpoint is damaged ({fault} is wrong); use an earlier one")


class _Resume(msgspec.Struct):
    """Return the state for resuming, besides model and optimiser."""

    settings: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    stage: dict[str, Tensor] = {}
    left_out_views: dict[str, str] = {}  # see ``components.view_checks``


class _Model(msgspec.Struct, kw_only=True):
    """A model with its optimiser."""

    state_dict: dict[str, Tensor]
    optimizer_state_dict: dict[str, Any]


class _Payload(_Model, kw_only=True):
    """All of a checkpoint."""

    train_losses: list[float]
    epoch: Count
    iteration: Count
    background: _Model | None = None
    antialiased: bool = False
    resume: _Resume | None = None


class _Group(msgspec.Struct):
    """A parameter group of the optimiser."""

    name: str
    lr: float
    params: list[int]


class _Optimizer(msgspec.Struct):
    """Adam's state; empty in files that only keep a model."""

    state: dict[int, dict[str, Any]]
    param_groups: list[_Group]


def check_payload(path: Path, payload: Any, check: PayloadCheck | None = None) -> None:
    """Check the common entries of checkpoints, then those of the stage.

    Raises:
        UserError: The content makes no sense.
    """
    try:
        checked = msgspec.convert(payload, _Payload)
        for model in (checked, checked.background):
            if model is None:
                continue
            for name, tensor in model.state_dict.items():
                _check_dense(name, tensor)
            if model.optimizer_state_dict:
                optimizer = msgspec.convert(model.optimizer_state_dict, _Optimizer)
                _check_optimizer(optimizer, model.state_dict)
        if checked.resume is not None:
            _check_resume(checked.resume, payload["resume"])
        if check is not None:
            check(payload)
    except _FAULTS as error:
        raise senseless(path, error) from error


def senseless(path: Path, error: Exception) -> UserError:
    """Error for a checkpoint with valid checksums and invalid contents."""
    reason = " ".join(str(error).replace("`", "").split())
    return UserError(f"{path}: the checkpoint makes no sense ({reason}); use an earlier one")


def _check_optimizer(optimizer: _Optimizer, state: Mapping[str, Tensor]) -> None:
    names = [group.name for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        parameter = state.get(f"_{group.name}", state.get(group.name))
        if parameter is None or group.params != [index]:
            raise ValueError(f"group {group.name} of the optimiser belongs to no parameter")
        if index in optimizer.state:
            _check_moments(group.name, optimizer.state[index], parameter)
    if any(index not in range(len(names)) for index in optimizer.state):
        raise ValueError("the optimiser has moments of no parameter")


def _check_moments(name: str, saved: Mapping[str, Any], parameter: Tensor) -> None:
    step = saved.get("step")
    if isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        step = step.item()
    # NaN is not between any two numbers.
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < 2**31:
        raise ValueError(f"step of {name} is no number of steps")
    for moment in MOMENTS:
        value = saved.get(moment)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            raise ValueError(f"{moment} of {name} has not the shape {tuple(parameter.shape)}")
        _check_dense(f"{moment} of {name}", value)
        if not value.is_floating_point():
            raise ValueError(f"{moment} of {name} is a tensor of {value.dtype}")
        if moment != MOMENTS[0] and bool((value < 0).any()):
            raise ValueError(f"{moment} of {name} is negative")


def _check_resume(resume: _Resume, raw: Mapping[str, Any]) -> None:
    plain = [raw.get(name) for name in ("settings", "inputs", "sources")]
    if is_deeper(plain, MAX_DEPTH) or not _is_plain(plain):
        raise ValueError("settings are no plain values")
    for name, tensor in resume.stage.items():
        _check_dense(f"{name} of the stage", tensor)


def _check_dense(name: str, tensor: Tensor) -> None:
    """Plain memory, a type of number that can be computed with, no NaN and no infinity."""
    is_odd = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
    if is_odd or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has values of NaN or infinity")


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
