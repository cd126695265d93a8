# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose checksums are right and whose content is not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.robustness.fuzz_mutations import STRINGS


def spoil_payload(path: Path, draw: Random) -> str:
    """Change a checkpoint at random places and say where."""
    payload: Any = torch.load(path, weights_only=True)
    said = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        payload, place = _mutate(payload, draw)
        said.append(place)
    torch.save(payload, path)
    return f"{path.name}: {'; '.join(said)}"


def _mutate(payload: Any, draw: Random) -> tuple[Any, str]:
    places = list(_places(payload, ()))
    if not places or draw.random() < 0.03:
        junk = _junk(None, draw)
        return junk, f"all of it is {_shown(junk)}"
    # Each key of the file by itself, or the many entries of the optimiser would take all turns.
    top = draw.choice(sorted({str(path[0]) for path in places}))
    path = draw.choice([path for path in places if str(path[0]) == top])
    holder = payload
    for step in path[:-1]:
        holder = holder[step]
    place, key = "".join(f"[{step!r}]" for step in path), path[-1]
    action = draw.randrange(8)
    if action == 0:
        del holder[key]
        return payload, f"{place} is gone"
    if action == 1 and isinstance(holder, dict):
        holder[draw.choice((*STRINGS, 0, -1, 7, None, 2.5))] = holder.pop(key)
        return payload, f"{place} has another key"
    if action == 2 and isinstance(holder, dict):
        other = draw.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return payload, f"{place} is swapped with {other!r}"
    holder[key] = _junk(holder[key], draw)
    return payload, f"{place} is {_shown(holder[key])}"


def _places(value: Any, path: tuple) -> Iterator[tuple]:
    if isinstance(value, dict):
        keys: Any = list(value)
    elif isinstance(value, list):
        keys = range(min(len(value), 8))
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def _junk(value: Any, draw: Random) -> Any:
    if isinstance(value, Tensor) and draw.random() < 0.75:
        return _other_tensor(value, draw)
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    return draw.choice((
        None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, -(2**70), 10**4_999, 0.5, -1.0,
        float("nan"), float("inf"), 1e308, b"", b"bytes", "", *draw.sample(STRINGS, 4), [], {}, (),
        [1, 2], [None], ["a", 3.0], {"a": 1}, {0: {}}, (1, 2), nested, OrderedDict(a=1),
        torch.zeros(()), torch.zeros(0), torch.zeros(3, 3), torch.tensor(float("nan")),
        torch.Size([2, 3]), torch.float16, {1, 2},
    ))  # fmt: skip


def _other_tensor(tensor: Tensor, draw: Random) -> Tensor:
    """Another shape, type, layout or value."""
    if tensor.layout != torch.strided:
        return torch.zeros(tensor.shape)
    n = tensor.shape[0] if tensor.dim() else 0
    kind = draw.randrange(16)
    if kind < 4:
        dtype = (torch.float64, torch.int64, torch.bool, torch.complex64)[kind]
        return tensor.to(dtype)
    if kind == 4:
        return tensor.to(draw.choice((torch.float16, torch.bfloat16, torch.uint8, torch.int8)))
    if kind == 5:
        return tensor[: n // 2] if n else tensor.repeat(2)
    if kind == 6:
        return torch.cat([tensor, tensor[:1]]) if n else tensor[None]
    if kind == 7:
        return tensor.flatten()
    if kind == 8:
        return tensor[..., None] if draw.random() < 0.5 else tensor[None]
    if kind == 9:
        return tensor.transpose(0, -1).contiguous() if tensor.dim() > 1 else tensor.new_zeros(0)
    if kind == 10:
        return torch.zeros(0, *tensor.shape[1:], dtype=tensor.dtype)
    if kind == 11 and n:
        return tensor.to_sparse()
    if kind == 12 and n:
        # One value for all rows: nothing is stored, but the shape is as it should be.
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    values = (float("nan"), float("inf"), -1e30, -1.0, 1e9, 0.0)
    spoiled = tensor.clone()
    number = draw.choice(values)
    if not spoiled.is_floating_point():
        number = draw.choice((-1, 2**31 - 1, 10**6))
    if spoiled.numel() and kind == 13:
        spoiled.reshape(-1)[draw.randrange(spoiled.numel())] = number
    elif spoiled.numel():
        spoiled.fill_(number)
    return spoiled


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.layout} tensor of {value.dtype} {tuple(value.shape)}"
    # Numbers of thousands of digits have no text.
    number = isinstance(value, int) and abs(value) > 10**30
    return "a large number" if number else f"{type(value).__name__} {value!r}"[:60]
