# SPDX-License-Identifier: Apache-2.0
"""Checks of what a GPU can do, each a program of its own, whose success is remembered.

What only some drivers get right is tried in another process, which a fault may take with it. That
takes a few seconds, so it is tried once for each driver, card and version of torch and Warp.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import torch
import warp as wp

from sugar_utils.device import driver_version
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest, read_json, write_json_atomic
from sugar_utils.libraries import run_alone

SECONDS = 120.0  # that a check may take; the first one may have to compile kernels
PASSED_FILE = "device-checks.json"  # in the folder of compiled kernels


def obstacle(module: str, device: torch.device) -> str | None:
    """Return why a check fails on a GPU; None where it passes, or has passed, and on a CPU.

    Args:
        module: The check, which gets the device as its argument, and fails by an exception.
    """
    if device.type != "cuda":
        return None
    facts = _facts(module, device)
    if facts in _passed():
        return None
    end = time.monotonic() + SECONDS

    def limit(n_bytes: int) -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"no answer after {SECONDS:.0f} seconds")

    try:
        run_alone(module, [str(device)], limit)
    except (UserError, MemoryError, TimeoutError) as error:
        return str(error)
    _remember(facts)
    return None


def _facts(module: str, device: torch.device) -> str:
    """Everything that decides whether a check passes."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}")
    card = torch.cuda.get_device_name(device)
    versions = f"driver {driver_version()}, torch {torch.__version__}, Warp {wp.__version__}"
    return f"{module} {file_digest(Path(spec.origin))}: {card}, {versions}"


def _path() -> Path:
    return Path(str(wp.config.kernel_cache_dir)) / PASSED_FILE


def _passed() -> list[str]:
    """Return the checks that passed so far; none where the file cannot be read."""
    try:
        content = read_json(_path())
    except UserError:
        return []
    return content if isinstance(content, list) else []


def _remember(facts: str) -> None:
    """Write that a check passed; where that fails, it is made again."""
    try:
        write_json_atomic(_path(), [*_passed(), facts])
    except (OSError, UserError):
        return
