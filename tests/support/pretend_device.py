# SPDX-License-Identifier: Apache-2.0
"""A second device on a machine that has one: host memory that says it is not on the host.

Inside :func:`pretend_gpu` every tensor has a side. What our code makes with an explicit
``device="cpu"``, reads from files or brings home with ``.cpu()`` is on the host; what it makes on
``GPU``, or sends there, is on the device; results take the side of their operands. Mixing sides,
making a tensor without saying where, and looking at device memory from NumPy are errors, as they
would be (or would be slow) with a real GPU. Kernels run on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import warp as wp
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sugar_utils import warp_launch
from sugar_utils.warp_launch import Argument, TypedTensor

GPU = torch.device("cpu", 0)
"""Stands for the device: ``cpu`` to torch and Warp, but not equal to the host's ``cpu``."""

HOST = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
FACTORIES = {
    getattr(torch, name)
    for name in (
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "rand",
        "randn",
        "randint",
        "randperm",
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "triu_indices",
        "tril_indices",
        "asarray",
    )
}
CONVERSIONS = (torch.tensor, torch.as_tensor, torch.asarray)
_OUR_FOLDERS = (
    "gaussian_splatting",
    "sugar_scene",
    "sugar_trainers",
    "sugar_extractors",
    "sugar_pipeline",
    "sugar_utils",
)


class WrongSide(AssertionError):
    """Something that fails or is slow with a real GPU."""


def _caller() -> str | None:
    """File and line of ours that called torch; None if the nearest Python file is not ours."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if ROOT not in path.parents or path.relative_to(ROOT).parts[0] not in _OUR_FOLDERS:
        return None
    return f"{path.relative_to(ROOT).as_posix()}:{frame.f_lineno}"


def side_of(tensor: Tensor) -> torch.device | None:
    """``GPU``, ``HOST``, or None where nothing is known, as of tensors that autograd made."""
    return getattr(tensor, "_side", None)


def _mark(result: Any, side: torch.device | None) -> Any:
    if side is not None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                leaf._side = side
    return result


class _Sides(TorchFunctionMode):
    """Follows tensors through torch's Python interface; ``log`` collects what was created."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[torch.device, int] = {GPU: 0, HOST: 0}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return side_of(args[0]) or GPU
        if func in FACTORIES:
            return self._make(func, args, kwargs)
        if func in (Tensor.to, Tensor.cpu):
            return self._move(func, args, kwargs)
        if func in (Tensor.numpy, Tensor.__array__) and side_of(args[0]) is GPU:
            raise WrongSide(f"{_caller()}: NumPy cannot read device memory")
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        side = self._common_side(func, operands)
        explicit = kwargs.get("device")
        if explicit is not None:
            side = GPU if torch.device(explicit) == GPU else HOST
        result = func(*args, **kwargs)
        if func == Tensor.grad.__get__:
            side = side_of(args[0])
        return _mark(result, side)

    def _make(self, func, args, kwargs):
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if kwargs.get("device") is None:
            if func in CONVERSIONS and source is not None:
                return _mark(func(*args, **kwargs), side_of(source))
            where = _caller()
            if where is not None:
                raise WrongSide(f"{where}: torch.{func.__name__} does not say on which device")
            return _mark(func(*args, **kwargs), HOST)
        side = GPU if torch.device(kwargs["device"]) == GPU else HOST
        self.made[side] += 1
        return _mark(func(*args, **kwargs), side)

    def _move(self, func, args, kwargs):
        tensor, rest = args[0], [*args[1:], kwargs.get("device")]
        side = side_of(tensor)
        if func is Tensor.cpu:
            side = HOST
        for word in rest:
            if isinstance(word, Tensor):
                side = side_of(word)
            elif isinstance(word, (torch.device, str)):
                side = GPU if torch.device(word) == GPU else HOST
        result = func(*args, **kwargs)
        if result is tensor and side is not side_of(tensor):
            # A real move copies; here the two sides share the memory.
            result = tensor.view(tensor.shape) if tensor.requires_grad else tensor.detach()
        return _mark(result, side)

    def _common_side(self, func, operands):
        known = {side_of(x) for x in operands if x.dim() > 0} - {None}
        if len(known) > 1 and func not in (Tensor.copy_, torch.Tensor.__repr__):
            # Masks and rows for an index may be on the host, as torch allows it.
            own = side_of(operands[0])
            if func in (Tensor.__getitem__, Tensor.__setitem__) and own is GPU:
                return own
            shapes = [tuple(x.shape) for x in operands]
            raise WrongSide(f"{_caller()}: {func.__name__} mixes host and device, {shapes}")
        if known:
            return known.pop()
        scalars = {side_of(x) for x in operands} - {None}
        return GPU if GPU in scalars else (HOST if scalars else None)


@contextlib.contextmanager
def pretend_gpu() -> Iterator[_Sides]:
    """Follow sides inside the context."""
    # Modes do not see these two.
    originals = {name: getattr(torch, name) for name in ("from_numpy", "load")}
    for name, original in originals.items():
        setattr(torch, name, functools.partial(_on_host, original))
    try:
        with _Sides() as sides, _checked_launches():
            yield sides
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


@contextlib.contextmanager
def _checked_launches() -> Iterator[None]:
    """Arguments of a kernel lie on one side."""
    prepare, describe, launch_tiled = warp_launch._prepare, warp_launch.describe, wp.launch_tiled
    given = set()

    def note(argument: Any) -> None:
        if isinstance(argument, Argument):
            tensor = argument.tensor if isinstance(argument, TypedTensor) else argument
            given.add(side_of(tensor))

    def check() -> None:
        sides = given - {None}
        given.clear()
        if len(sides) > 1:
            raise WrongSide("a kernel is given tensors of host and device")

    def prepare_checked(kernel: Any, dim: Any, inputs: Any, **how: Any) -> Any:
        for argument in inputs:
            note(argument)
        check()
        prepared = prepare(kernel, dim, inputs, **how)
        # Preparing describes the same arguments again.
        given.clear()
        return prepared

    def describe_watched(argument: Any) -> Any:
        note(argument)
        return describe(argument)

    def launch_checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return launch_tiled(*args, **kwargs)

    with (
        mock.patch.object(warp_launch, "_prepare", prepare_checked),
        mock.patch.object(warp_launch, "describe", describe_watched),
        mock.patch.object(wp, "launch_tiled", launch_checked),
    ):
        yield


def _on_host(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _mark(make(*args, **kwargs), HOST)
