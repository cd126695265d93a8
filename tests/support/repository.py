# SPDX-License-Identifier: Apache-2.0
"""The files of this repository, and what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    "sugar_utils",
    "gaussian_splatting",
    "sugar_capture",
    "sugar_scene",
    "sugar_trainers",
    "sugar_extractors",
    "sugar_viewer",
    "sugar_pipeline",
)
"""From the ground up; a file imports from its own floor and from those below."""


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
