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

from gaussian_splatting.engine.model import GROUP_NAMES, STATE_NAMES
from gaussian_splatting.optim.adam import MOMENTS
from gaussian_splatting.optim.learned_exposure import KEY as EXPOSURE_KEY
from sugar_utils import files
from sugar_utils.errors import Notify, UserError
from sugar_utils.memory import out_of_memory
from sugar_utils.schemas import MAX_DEPTH, Count, is_deeper

PAYLOAD_KEYS = ("state_dict", "train_losses", "epoch", "iteration", "optimizer_state_dict")
_DOS_DIRECTORY = 0x10
_FILE_NAME = re.compile(r"^(\d+)\.pt$")

FACES = "_surface_mesh_faces"
THICKNESS = "surface_mesh_thickness"
_BANDS = (0, 3, 8, 15)
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
    ) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"--keep_checkpoints {keep}: keep at least 1 checkpoint to resume from")
        self.directory = files.check_writable(directory)
        self._keep = keep
        self._permanent = frozenset(milestones) | ({final} if final is not None else set())
        self._broken: set[int] = set()
        self._last_saved: int | None = None
        files.remove_stale_temporaries(self.directory)

    def iterations(self) -> list[int]:
        """Iterations that have a file, ascending; the files may be broken."""
        matches = (_FILE_NAME.match(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def save(self, iteration: int, payload: Mapping[str, Any]) -> Path:
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
                payload = load_numbered(path)
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
    return directory / f"{iteration}.pt"


def save_payload(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a dictionary of tensors and primitives, complete or not at all."""
    portable = to_portable(payload)
    with files.atomic_path(path) as temporary, temporary.open("wb") as file:
        writer = _ErrorKeeper(file)
        try:
            torch.save(portable, writer)
        except RuntimeError as error:
            # The archive writer hides the reason (disk full) behind an error of its own.
            raise (writer.error or error) from None


def load_payload(path: Path) -> dict[str, Any]:
    """Read a checkpoint of any program after verifying the checksum of every part of it."""
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
    check_payload(path, payload)
    return payload


def load_numbered(path: Path) -> dict[str, Any]:
    """As :func:`load_payload`; where the name of the file is a number, it is the iteration."""
    payload = load_payload(path)
    named = _FILE_NAME.match(path.name)
    if named and payload["iteration"] != int(named.group(1)):
        raise UserError(
            f"{path}: holds iteration {payload['iteration']}, not that of its name; rename it, or "
            "use another checkpoint"
        )
    return payload


def to_portable(value: Any, place: str = "payload") -> Any:
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
    for kind in (int, float, str, bytes):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
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

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


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
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be read ({reason}); check the path") from error
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
    settings: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    stage: dict[str, Tensor] = {}
    left_out_views: dict[str, str] = {}


class _Model(msgspec.Struct, kw_only=True):
    state_dict: dict[str, Tensor]
    optimizer_state_dict: dict[str, Any]


class _Payload(_Model, kw_only=True):
    train_losses: list[float]
    epoch: Count
    iteration: Count
    background: _Model | None = None
    antialiased: bool = False
    resume: _Resume | None = None


class _Group(msgspec.Struct):
    name: str
    lr: float
    params: list[int]


class _Optimizer(msgspec.Struct):
    """Adam's state; empty in files that only keep a model."""

    state: dict[int, dict[str, Any]]
    param_groups: list[_Group]


def check_payload(path: Path, payload: Any) -> None:
    try:
        found = msgspec.convert(payload, _Payload)
        for model in (found, found.background):
            if model is None:
                continue
            _check_model(model.state_dict)
            if model.optimizer_state_dict:
                optimizer = msgspec.convert(model.optimizer_state_dict, _Optimizer)
                _check_optimizer(optimizer, model.state_dict)
        if found.resume is not None:
            _check_resume(found.resume, payload["resume"], found.state_dict)
    except _FAULTS as error:
        reason = " ".join(str(error).replace("`", "").split())
        raise UserError(
            f"{path}: the checkpoint makes no sense ({reason}); use an earlier one"
        ) from error


def _check_model(state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        _check_dense(name, tensor, floating=name != FACES)
    if "all_densities" not in state:
        return
    densities = state["all_densities"]
    n = densities.shape[0] if densities.dim() else 0
    bound = FACES in state
    shapes: dict[str, tuple[int, ...]] = {
        "all_densities": (n, 1),
        "_scales": (n, 2 if bound else 3),
        "_quaternions": (n, 2 if bound else 4),
        "_sh_coordinates_dc": (n, 1, 3),
    }
    points = state.get("_points")
    if points is not None:
        shapes["_points"] = (points.shape[0] if bound and points.dim() else n, 3)
    rest = state.get("_sh_coordinates_rest")
    if rest is not None:
        bands = rest.shape[1] if rest.dim() == 3 and rest.shape[1] in _BANDS else _BANDS[-1]
        shapes["_sh_coordinates_rest"] = (n, bands, 3)
    for name, shape in shapes.items():
        if name in state and tuple(state[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {shape}")
    if n == 0:
        raise ValueError("there are no Gaussians")
    if bound and points is not None:
        faces = state[FACES]
        thickness = state.get(THICKNESS)
        if faces.is_floating_point() or faces.dim() != 2 or faces.shape[1] != 3 or not len(faces):
            raise ValueError(f"{FACES} is no list of triangles")
        if not 0 <= int(faces.min()) <= int(faces.max()) < len(points):
            raise ValueError(f"{FACES} names vertices that are not there")
        if thickness is not None and (thickness.numel() != 1 or float(thickness) < 0):
            raise ValueError(f"{THICKNESS} is no thickness")


def _check_optimizer(optimizer: _Optimizer, state: Mapping[str, Tensor]) -> None:
    names = [group.name for group in optimizer.param_groups]
    if all(name in state for name in STATE_NAMES.values()) and names != [*GROUP_NAMES.values()]:
        raise ValueError(f"the optimiser has the groups {', '.join(names)[:100] or 'none'}")
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
        _check_dense(f"{moment} of {name}", value, floating=True)
        if moment != MOMENTS[0] and bool((value < 0).any()):
            raise ValueError(f"{moment} of {name} is negative")


def _check_resume(resume: _Resume, raw: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    plain = [raw.get(name) for name in ("settings", "inputs", "sources")]
    if is_deeper(plain, MAX_DEPTH) or not _is_plain(plain):
        raise ValueError("settings are no plain values")
    for name, tensor in resume.stage.items():
        _check_dense(f"{name} of the stage", tensor, floating=name != "neighbors")
        if name.startswith(EXPOSURE_KEY) and tuple(tensor.shape) != (3, 2, 3):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (3, 2, 3)")
    if "all_densities" not in state:
        return
    n = state["all_densities"].shape[0]
    statistics = [resume.stage[name] for name in ("gradient_sum", "views") if name in resume.stage]
    if statistics and any(t.shape != (n,) or bool((t < 0).any()) for t in statistics):
        raise ValueError(f"statistics of the stage are not those of {n} Gaussians")
    if len(statistics) == 1:
        raise ValueError("statistics of the stage are incomplete")
    scores = resume.stage.get("pruning_scores")
    if scores is not None and (scores.shape != (n, 3) or bool((scores < 0).any())):
        raise ValueError(f"pruning scores of the stage are not those of {n} Gaussians")
    if "gaussian_budget" in resume.stage and resume.stage["gaussian_budget"].shape != (2,):
        raise ValueError("the budget of the stage is not of two numbers")
    neighbors = resume.stage.get("neighbors")
    if neighbors is not None and not _are_rows(neighbors, n):
        raise ValueError(f"neighbors of the stage are not those of {n} Gaussians")


def _are_rows(neighbors: Tensor, n: int) -> bool:
    if neighbors.dtype != torch.int32 or neighbors.dim() != 2 or neighbors.shape[0] != n:
        return False
    return bool(neighbors.numel()) and 0 <= int(neighbors.min()) <= int(neighbors.max()) < n


def _check_dense(name: str, tensor: Tensor, *, floating: bool) -> None:
    """Plain memory, a type of number that can be computed with, no NaN and no infinity."""
    odd = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
    if odd or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}")
    if floating and not tensor.is_floating_point():
        raise ValueError(f"{name} is a tensor of {tensor.dtype}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has values of NaN or infinity")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
