# SPDX-License-Identifier: Apache-2.0
"""Where SuGaR's tools expect files to lie. Other programs rely on these names."""

from __future__ import annotations

from pathlib import Path

from sugar_trainers.stage_config import MULTIVIEW, CoarseConfig, RefineConfig

OUTPUT_ROOT = Path("output")
# Folders of the results of stages, below the output.
VANILLA_FOLDER = "vanilla_gs"
COARSE_FOLDER = "coarse"
COARSE_MESH_FOLDER = "coarse_mesh"
REFINED_FOLDER = "refined"
REFINED_PLY_FOLDER = "refined_ply"
REFINED_MESH_FOLDER = "refined_mesh"
METRICS_FOLDER = "metrics"
# Files in the folder of results of a run.
INDEX = "index.html"
LOG = "log.txt"

ESTIMATION_FACTOR = CoarseConfig.estimation_factor
NORMAL_FACTOR = CoarseConfig.normal_factor
NORMAL_CONSISTENCY = RefineConfig.normal_consistency_factor


def number_text(value: float) -> str:
    """A number as file names carry it: 0.2 is ``02``, 1.0 is ``10``."""
    return str(float(value)).replace(".", "")


def scene_name(scene_path: Path) -> str:
    """Last component of the scene path; of ``.``, ``..`` and ``x/..`` that of the folder meant.

    It names folders below the output, so it must lead into none but its own. The root of a drive
    has no name and is called ``scene``.
    """
    if scene_path.name not in ("", ".."):
        return scene_path.name
    return scene_path.resolve().name or "scene"


def stage_folder(folder: str, scene_path: Path, root: Path = OUTPUT_ROOT) -> Path:
    """Folder of what a stage made of a scene, below the output."""
    return root / folder / scene_name(scene_path)


def coarse_name(
    iteration: int,
    regularization: str,
    estimation_factor: float = ESTIMATION_FACTOR,
    normal_factor: float = NORMAL_FACTOR,
) -> str:
    """Folder name of a coarse run; ``density`` and ``dn_consistency`` share one by tradition.

    Weights are no part of the name of ``multiview``, which has others.
    """
    start = f"sugarcoarse_3Dgs{iteration}_"
    if regularization == MULTIVIEW:
        return start + MULTIVIEW
    kind = "sdfestim" if regularization == "sdf" else "densityestim"
    return f"{start}{kind}{number_text(estimation_factor)}_sdfnorm{number_text(normal_factor)}"


def refined_name(mesh_path: Path, normal_consistency_factor: float, per_triangle: int) -> str:
    """Name that all files of a refined model share; that of the mesh to the first dot is in it."""
    mesh = mesh_path.name.split(".", 1)[0].removeprefix("sugarmesh_")
    weight = number_text(normal_consistency_factor)
    return f"sugarfine_{mesh}_normalconsistency{weight}_gaussperface{per_triangle}"
