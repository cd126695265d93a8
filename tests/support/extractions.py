# SPDX-License-Identifier: Apache-2.0
"""Options of extractions from a scene of ``mesh_scenes``."""

from __future__ import annotations

from pathlib import Path

from sugar_extractors.mesh.mesh_config import MeshOptions
from tests.support.mesh_scenes import ITERATION, MeshScene


def brief_extraction(scene: MeshScene, folder: Path, **settings: object) -> MeshOptions:
    """A coarse mesh of 3,000 triangles in a folder, with further settings, and others of these."""
    brief: dict[str, object] = {
        "surface_levels": (0.3,),
        "decimation_targets": (3_000,),
        "meshing_backend": "pycolmap",
    }
    return MeshOptions(
        scene_path=scene.root,
        checkpoint_path=scene.checkpoint,
        iteration_to_load=ITERATION,
        coarse_model_path=scene.coarse,
        mesh_output_dir=folder,
        **brief | settings,
    )
