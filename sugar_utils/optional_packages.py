# SPDX-License-Identifier: Apache-2.0
"""Packages that only some commands need, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from sugar_utils.errors import UserError


def load_package(
    what: str, package: str, *modules: str, instead: str | None = None
) -> tuple[ModuleType, ...]:
    """Import modules of a package that may be missing.

    Args:
        what: Needs it.
        package: Its name for pip.
        modules: What to import, in this order.
        instead: What to do without it, as an infinitive; None where there is no other way.

    Returns:
        The modules.

    Raises:
        UserError: It is not installed.
    """
    try:
        return tuple(importlib.import_module(module) for module in modules)
    except ImportError as error:
        advice = f"install it with 'pip install {package}'" + (f", or {instead}" if instead else "")
        raise UserError(f"{what} needs the package {package} ({error}); {advice}") from error
