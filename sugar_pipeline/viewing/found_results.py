# SPDX-License-Identifier: Apache-2.0
"""What there is to look at in a file or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.data.ply import holds_gaussians
from gaussian_splatting.vanilla.vanilla_run import CHECKPOINT_FOLDER
from sugar_utils.errors import UserError

VANILLA, COARSE, COARSE_MESH = "vanilla Gaussians", "coarse Gaussians", "coarse mesh"
REFINED, TEXTURED = "refined Gaussians", "textured mesh"
STAGES = (VANILLA, COARSE, COARSE_MESH, REFINED, TEXTURED)
"""What a folder of results holds at most one of each, in the order in which they are made."""

FILES = (".ply", ".pt", ".spz", ".splat", ".obj", ".glb")
_DEPTH = 4
_PASSED_OVER = ("sparse", "images", "masks", "tensorboard", "renders", "exports", "refined_ply")


@dataclass(frozen=True)
class FoundResult:
    """Something to look at.

    Attributes:
        title: What the page calls it.
        path: File, or the folder of a run.
    """

    title: str
    path: Path


def find_results(paths: Sequence[Path], notify: Callable[[str], None]) -> list[FoundResult]:
    """What is to be shown of files and folders; of several in a folder the newest of each stage.

    Args:
        paths: Files, folders of runs, folders of results.
        notify: Told which ones were passed over.

    Returns:
        Their titles differ.

    Raises:
        UserError: One does not exist, or holds nothing that can be shown.
    """
    found: list[FoundResult] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path of the result")
        if path.is_file():
            if path.suffix.lower() not in FILES:
                raise UserError(f"{path}: cannot be shown; pass one of {', '.join(FILES)}")
            found.append(FoundResult(_stage_of(path) or path.name, path))
        else:
            found += _newest(path, notify)
    taken: dict[str, int] = {}
    for place, result in enumerate(found):
        taken[result.title] = number = taken.get(result.title, 0) + 1
        if number > 1:
            found[place] = FoundResult(f"{result.title} ({number})", result.path)
    return found


def _newest(folder: Path, notify: Callable[[str], None]) -> list[FoundResult]:
    """The last of each stage in a folder."""
    own = _stage_of(folder)
    if own is not None:
        return [FoundResult(own, folder)]
    of_stage: dict[str, list[Path]] = {}
    for path in _results_below(folder, _DEPTH):
        of_stage.setdefault(_stage_of(path) or path.name, []).append(path)
    if not of_stage:
        raise UserError(f"{folder}: holds no result of any stage; name an output folder or a file")
    for stage, paths in of_stage.items():
        paths.sort(key=lambda path: path.stat().st_mtime)
        for other in paths[:-1]:
            notify(f"not shown, an older one: {other} ({stage})")
    order = {stage: place for place, stage in enumerate(STAGES)}
    stages = sorted(of_stage, key=lambda stage: order.get(stage, len(order)))
    return [FoundResult(stage, of_stage[stage][-1]) for stage in stages]


def _results_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _PASSED_OVER:
            continue
        if _stage_of(path) is not None:
            yield path
        elif path.is_dir() and depth > 1:
            yield from _results_below(path, depth - 1)


def _stage_of(path: Path) -> str | None:
    """The stage that made a file or a run's folder; None if it is another file or folder."""
    if path.is_dir():
        if (path / "point_cloud").is_dir():
            return VANILLA
        return _stage_of_run(path.name) if _has_checkpoints(path) else None
    suffix = path.suffix.lower()
    if suffix == ".pt":
        return _stage_of_run(path.resolve().parent.name)
    if suffix == ".obj" and not path.stem.endswith("_placed"):
        return TEXTURED
    if suffix == ".ply" and path.name.startswith("sugarmesh_") and not holds_gaussians(path):
        return COARSE_MESH
    return None


def _has_checkpoints(folder: Path) -> bool:
    return any(path.stem.isdigit() for path in folder.glob("*.pt"))


def _stage_of_run(name: str) -> str | None:
    if name.startswith("sugarfine_"):
        return REFINED
    if name.startswith("sugarcoarse_"):
        return COARSE
    return VANILLA if name == CHECKPOINT_FOLDER else None
