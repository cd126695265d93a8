# SPDX-License-Identifier: Apache-2.0
"""Find the results in files and folders, and the stage of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.placement import MESH, SPLATS, TRANSFORM
from gaussian_splatting.formats.ply import holds_gaussians
from gaussian_splatting.scenes.reference_layout import CHECKPOINT_FOLDER
from sugar_trainers.naming import REFINED_PLY_FOLDER
from sugar_utils.errors import Notify, UserError

FILES = (".ply", ".pt", ".spz", ".sog", ".splat", ".obj", ".glb")
VANILLA = "vanilla Gaussians"
COARSE = "coarse Gaussians"
COARSE_MESH = "coarse mesh"
REFINED = "refined Gaussians"
FINAL_GAUSSIANS = "Gaussians"
TEXTURED = "textured mesh"
# A folder of results shows at most one of each; in the order in which they are made.
STAGES = (VANILLA, COARSE, COARSE_MESH, REFINED, FINAL_GAUSSIANS, TEXTURED)
_DEPTH = 4  # levels of folders that are searched
_SKIPPED_NAMES = (
    "sparse",
    "images",
    "masks",
    "tensorboard",
    "renders",
    "exports",
    REFINED_PLY_FOLDER,
)


@dataclass(frozen=True)
class FoundResult:
    """A file or folder to show."""

    title: str
    path: Path


def find_results(paths: Sequence[Path], notify: Notify) -> list[FoundResult]:
    """Return the results to show; of several in a folder, the newest of each stage.

    Titles differ: a second one of the same kind gets a number.

    Raises:
        UserError: A path is missing or cannot be shown.
    """
    results: list[FoundResult] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path of the result")
        if path.is_file():
            refuse_other_kinds(path)
            if path.suffix.lower() not in FILES:
                raise UserError(f"{path}: cannot be shown; pass one of {', '.join(FILES)}")
            results.append(FoundResult(_stage_of(path) or path.name, path))
        else:
            results += _newest(path, notify)
    counts: Counter[str] = Counter()
    numbered = []
    for result in results:
        counts[result.title] += 1
        number = counts[result.title]
        title = result.title if number == 1 else f"{result.title} ({number})"
        numbered.append(FoundResult(title, result.path))
    return numbered


def _newest(folder: Path, notify: Notify) -> list[FoundResult]:
    """Return the newest result of each stage in a folder; the folder itself if it is a result."""
    folder_stage = _stage_of(folder)
    if folder_stage is not None:
        return [FoundResult(folder_stage, folder)]
    paths_of_stage: dict[str, list[Path]] = {stage: [] for stage in STAGES}
    for path in _results_below(folder, _DEPTH):
        stage = _stage_of(path) or path.name
        paths_of_stage.setdefault(stage, []).append(path)
    newest = []
    for stage, paths in paths_of_stage.items():
        paths.sort(key=lambda path: path.stat().st_mtime)
        for older in paths[:-1]:
            notify(f"not shown, an older one: {older} ({stage})")
        if paths:
            newest.append(FoundResult(stage, paths[-1]))
    if not newest:
        raise UserError(f"{folder}: holds no result of any stage; name an output folder or a file")
    return newest


def _results_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the results in a folder, and in folders of it down to a depth."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED_NAMES:
            continue
        if _stage_of(path) is not None:
            yield path
        elif path.is_dir() and depth > 1 and not (path / TRANSFORM).is_file():
            # Copies that stand upright are elsewhere than what they are copies of.
            yield from _results_below(path, depth - 1)


def _stage_of(path: Path) -> str | None:
    """Return the stage of a file or folder by its name; None if it is not a known result."""
    suffix = path.suffix.lower()
    name = path.name
    if path.is_dir():
        if (path / "point_cloud").is_dir():
            return VANILLA
        if not any(file.stem.isdigit() for file in path.glob("*.pt")):
            return None
    elif suffix == ".pt":
        name = path.resolve().parent.name
    elif suffix == ".obj":
        return None if path.stem.endswith("_placed") else TEXTURED
    elif (path.parent / TRANSFORM).is_file():
        return {SPLATS: FINAL_GAUSSIANS, f"{MESH}.ply": COARSE_MESH}.get(name)
    else:
        is_mesh = suffix == ".ply" and name.startswith("sugarmesh_") and not holds_gaussians(path)
        return COARSE_MESH if is_mesh else None
    if name.startswith("sugarfine_"):
        return REFINED
    if name.startswith("sugarcoarse_"):
        return COARSE
    return VANILLA if name == CHECKPOINT_FOLDER else None
