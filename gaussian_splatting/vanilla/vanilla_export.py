# SPDX-License-Identifier: Apache-2.0
"""The folder of a vanilla run in the 3DGS layout, with the models of some iterations."""

from __future__ import annotations

from gaussian_splatting.data.world_offset import write_offset
from gaussian_splatting.engine.component import ExportTarget
from gaussian_splatting.formats import ply as ply_files
from gaussian_splatting.scenes import reference_layout as layout
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.vanilla_options import VanillaFlags
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.console import Console


class LayoutExport:
    """Writes the folder with the model of an iteration; the stage calls it."""

    def __init__(self, scene: Scene, options: VanillaFlags, console: Console) -> None:
        self._scene = scene
        self._options = options
        self._console = console

    def __call__(self, iteration: int, stage: VanillaStage) -> None:
        """Write what describes the run, what the components add, and the model at last."""
        scene = self._scene
        root = self._options.model_path
        cameras = []
        for camera in scene.original_train_cameras:
            # Those that were left out from the start are as they were.
            is_learned = camera.name not in scene.dropped_views
            cameras.append(stage.calibrated(camera) if is_learned else camera)
        self._write_settings()
        layout.write_cameras_json(root, cameras, scene.original_test_cameras)
        write_offset(root, scene.offset)
        ply_files.write_point_ply(root / "input.ply", scene.points, scene.points_rgb)
        ply_path = layout.point_cloud_path(root, iteration)
        target = ExportTarget(root, ply_path.parent, scene, cameras, self._console)
        for component in stage.components:
            component.export(target)
        ply_files.write_gaussian_ply(ply_path, stage.model.cloud.detached())

    def _write_settings(self) -> None:
        options = self._options
        layout.write_cfg_args(
            options.model_path,
            source_path=options.source_path.resolve(),
            sh_degree=options.config.sh_degree,
            images=options.images,
            resolution=options.resolution,
            white_background=options.config.white_background,
            eval_split=options.eval,
        )
