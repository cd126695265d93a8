# SPDX-License-Identifier: Apache-2.0
"""The package usd-core, and stages in the axes and the unit that all exports have."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def new_package(
    usd: ModuleType, path: Path, target: Path, layer: str
) -> Iterator[tuple[Any, Path]]:
    """Write a USDZ package, complete or not at all: the body fills its stage.

    Args:
        usd: The package, by :func:`load_usd`.
        path: The file to write.
        target: Its name for errors.
        layer: Name of the layer in the package.

    Yields:
        The empty stage, and the folder for the files that it refers to.

    Raises:
        UserError: It cannot be written, or usd-core could not make it.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / layer
            stage = new_stage(usd, file)
            yield stage, Path(folder)
            stage.GetRootLayer().Save()
            _pack(usd, path, file)
    except (OSError, usd.Tf.ErrorException) as error:
        # USD lists errors as "Error in 'function' at line N in file F : 'reason'".
        reason = str(error).split(" : ", 1)[-1].splitlines()[0].strip(" '")
        raise UserError(
            f"cannot write {target}: {reason}; free some space, also in {tempfile.gettempdir()}"
        ) from error


def _pack(usd: ModuleType, path: Path, layer: Path) -> None:
    """Pack a layer and the files that it refers to into one USDZ, complete or not at all."""
    with atomic_path(path) as temporary:
        # The package goes by the suffix, and the temporary file has none.
        package = layer.with_name("package.usdz")
        if not usd.UsdUtils.CreateNewUsdzPackage(str(layer), str(package)):
            raise UserError(f"{path}: usd-core could not make the package; use --to glb")
        temporary.write_bytes(package.read_bytes())
