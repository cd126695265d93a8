# SPDX-License-Identifier: Apache-2.0
"""The files of this repository, and what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "sugar_utils",
    "gaussian_splatting/core",
    "gaussian_splatting",
    "gaussian_splatting/data",
    "gaussian_splatting/formats",
    "gaussian_splatting/data/scans",
    "gaussian_splatting/data/maps/estimators",
    "gaussian_splatting/data/maps",
    "gaussian_splatting/scenes",
    "gaussian_splatting/rasterization",
    "gaussian_splatting/losses",
    "gaussian_splatting/optim",
    "gaussian_splatting/engine",
    "gaussian_splatting/engine/recording",
    "gaussian_splatting/engine/checks",
    "gaussian_splatting/engine/reporting",
    "gaussian_splatting/components",
    "gaussian_splatting/vanilla",
    "sugar_capture/camera_readers",
    "sugar_capture/gps",
    "sugar_capture/features",
    "sugar_capture/pairs",
    "sugar_capture",
    "sugar_capture/registration",
    "sugar_capture/conversion",
    "sugar_scene",
    "sugar_scene/mesh_files",
    "sugar_maps",
    "sugar_trainers",
    "sugar_extractors",
    "sugar_extractors/mesh/fusion",
    "sugar_extractors/mesh/holes",
    "sugar_extractors/mesh/refinement",
    "sugar_extractors/mesh",
    "sugar_extractors/texture",
    "sugar_extractors/export/engines",
    "sugar_extractors/export/usd",
    "sugar_extractors/export",
    "sugar_extractors/outputs",
    "sugar_viewer",
    "sugar_pipeline/quality",
    "sugar_pipeline/pipeline",
    "sugar_pipeline/timing",
    "sugar_pipeline/demo",
    "sugar_pipeline/blocks",
    "sugar_pipeline",
)
"""From the ground up; a file imports from its own folder and from those before it."""

FLOORS = tuple(dict.fromkeys(folder.split("/")[0] for folder in FOLDERS))
"""The packages, from the ground up."""

KNOWN_UPWARD_IMPORTS = {
    ("gaussian_splatting/engine", "gaussian_splatting/engine/reporting"),
}
"""(folder, folder above it) of the imports that do not point down yet: no pair is ever added."""


def entry_points() -> list[Path]:
    """All scripts that a user starts."""
    inside = [ROOT / "gaussian_splatting" / name for name in ("convert.py", "train.py")]
    return [*sorted(ROOT.glob("*.py")), *inside]


def production_files() -> list[Path]:
    """Return the files of the product: all packages and the entry points."""
    inside = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return [*inside, *sorted(ROOT.glob("*.py"))]


def all_files() -> list[Path]:
    """Return the files of product, extension, tests and benchmarks."""
    folders = ("blender", "tests", "benchmarks")
    beside = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    return [*production_files(), *sorted(beside)]


def native_files() -> list[Path]:
    """C++ bodies of kernels."""
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.inc"))]


def module_file(module: str) -> Path | None:
    """Return the file of one of our modules or packages; None for any other."""
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def folder_of(path: Path) -> str:
    """Return the folder of a file in the repository, with slashes."""
    return path.parent.relative_to(ROOT).as_posix()


def name_of(path: Path) -> str:
    """Path in the repository, with slashes."""
    return path.relative_to(ROOT).as_posix()


def parametrize_files(files: list[Path]):
    """One test for each file, called by its name."""
    return pytest.mark.parametrize("path", files, ids=name_of)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere; relative imports are an error."""
    return _modules_in(path, ast.walk(tree_of(path)))


def modules_imported_at_run_time(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs: all but those that only a type checker reads."""
    tree = tree_of(path)
    unread = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    return _modules_in(path, (node for node in ast.walk(tree) if id(node) not in unread))


def _modules_in(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import in line {node.lineno}"
            yield node.module or ""
