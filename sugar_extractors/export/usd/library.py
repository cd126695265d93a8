# SPDX-License-Identifier: Apache-2.0
"""The package usd-core, and stages in the axes and the unit that all exports have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_package

_MODULES = (
    "Gf",
    "Kind",
    "Sdf",
    "Tf",
    "Usd",
    "UsdGeom",
    "UsdPhysics",
    "UsdShade",
    "UsdUtils",
    "UsdVol",
    "Vt",
)


def load_usd(what: str) -> ModuleType:
    """Return the package ``pxr``, whose modules are ``Usd``, ``UsdGeom`` and so on.

    Args:
        what: The flag or file that needs it, for the error.

    Raises:
        UserError: usd-core is not installed.
    """
    modules = [f"pxr.{name}" for name in _MODULES]
    return load_package(what, "usd-core", "pxr", *modules, instead="use another format")[0]


def new_stage(usd: ModuleType, layer: Path | None = None) -> Any:
    """Return an empty stage with y up, in metres.

    Args:
        layer: File of the stage; None for one in memory.
    """
    stage = usd.Usd.Stage.CreateInMemory() if layer is None else usd.Usd.Stage.CreateNew(str(layer))
    usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
    usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    return stage


def write_package(usd: ModuleType, path: Path, layer: Path) -> None:
    """Pack a layer and the files that it refers to into one USDZ, complete or not at all.

    Raises:
        UserError: usd-core could not make it.
    """
    with atomic_path(path) as temporary:
        # The package goes by the suffix, and the temporary file has none.
        package = layer.with_name("package.usdz")
        if not usd.UsdUtils.CreateNewUsdzPackage(str(layer), str(package)):
            raise UserError(f"{path}: usd-core could not make the package; use --to glb")
        temporary.write_bytes(package.read_bytes())


def write_error(usd: ModuleType, path: Path, error: Exception) -> UserError:
    """Return the error for a USD file that could not be written.

    USD lists errors as "Error in 'function' at line N in file F : 'reason'".
    """
    reason = str(error).split(" : ", 1)[-1].splitlines()[0].strip(" '")
    return UserError(
        f"cannot write {path}: {reason}; free some space, also in {tempfile.gettempdir()}"
    )
