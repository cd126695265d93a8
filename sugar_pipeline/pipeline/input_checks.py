# SPDX-License-Identifier: Apache-2.0
"""Checks of the inputs of later stages, made before the first stage."""

from __future__ import annotations

from pathlib import Path

from gaussian_splatting.data.consistency import check_view_names
from gaussian_splatting.data.maps.depth_maps import FOLDER as DEPTHS_FOLDER
from gaussian_splatting.data.maps.depth_maps import NO_DEPTHS, scan_named
from gaussian_splatting.data.maps.estimators.estimated_depths import ESTIMATORS, require_estimator
from gaussian_splatting.data.maps.map_files import find_folder
from gaussian_splatting.data.maps.normal_maps import FOLDER as NORMALS_FOLDER
from gaussian_splatting.data.maps.normal_maps import NO_NORMALS
from gaussian_splatting.data.observations import ALL_VIEWS
from gaussian_splatting.data.scans.scan_files import require_reader
from gaussian_splatting.scenes.scene import Scene, load_scene
from sugar_capture.features.photographs import described_photographs, output_names
from sugar_capture.scene_folder import DIVISORS, find_source, scene_root
from sugar_extractors import placing as placing
from sugar_extractors.texture.texturing import TextureOptions
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_trainers.capture import SugarSize, load_views
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.files import require_regular_file


def check_files_of_flags(plan: PipelinePlan) -> None:
    """Check that files and folders that later stages read exist.

    Raises:
        UserError: One is missing.
    """
    normals = plan.coarse.normal_options.normals
    if normals != NO_NORMALS.normals:
        find_folder(scene_root(plan.coarse.scene_path), normals, NORMALS_FOLDER, "--normals")
    vanilla = plan.vanilla
    # Otherwise the scene is read before anything else.
    if plan.convert is None or vanilla is None:
        return
    root = scene_root(plan.convert.source_path)
    if vanilla.init_ply is not None:
        require_regular_file(vanilla.init_ply)
        require_reader(vanilla.init_ply)
    depths = vanilla.depth_options.depths
    if depths in ESTIMATORS:
        require_estimator(depths)
    elif depths != NO_DEPTHS.depths:
        scan_path = scan_named(root, vanilla.depth_options)
        if scan_path is None:
            find_folder(root, depths, DEPTHS_FOLDER, "--depths")
        else:
            require_reader(scan_path)
    image_folders = ["images"]
    if plan.convert.resize:
        # Copies at other sizes are made with the cameras.
        image_folders += [f"images_{divisor}" for divisor in DIVISORS]
    if vanilla.images not in image_folders and not (root / vanilla.images).is_dir():
        raise UserError(f"--images {vanilla.images}: no such folder in {root}")
    cameras = plan.convert.sfm.cameras
    if cameras not in (None, "none") and not Path(cameras).exists():
        raise UserError(f"--cameras {cameras}: no such file or folder; check the path")


def check_names_of_photographs(plan: PipelinePlan) -> None:
    """Check that the photographs that flags name exist, if cameras are yet to be found.

    Frames of a video are not known yet, so their names are not checked.

    Raises:
        UserError: One does not exist.
    """
    if plan.convert is None:
        return
    source = find_source(plan.convert.source_path)
    if source.video is not None:
        return
    known_distance = None if plan.texture is None else plan.texture.placement.known_distance
    kept_views = () if plan.vanilla is None else plan.vanilla.view_options.keep_views
    names_views = bool(set(kept_views) - {ALL_VIEWS})
    if known_distance is None and not names_views:
        return
    photographs = described_photographs(source.folder, source.recursive)
    names = list(output_names(photographs))
    if plan.texture is not None and known_distance is not None:
        placing.check_names(plan.texture.placement, names)
    check_view_names(kept_views, names)


def check_places(plan: PipelinePlan) -> None:
    """Check that the cameras that give the scale are registered, as soon as there are cameras.

    Raises:
        UserError: One is not.
    """
    if plan.texture is None or plan.texture.placement.known_distance is None:
        return
    scene = _scene_of_texture(plan, plan.texture)
    placing.scale_of(scene.calibrated_cameras, plan.texture.placement, scene.offset)


def _scene_of_texture(plan: PipelinePlan, texture: TextureOptions) -> Scene:
    """The scene as the texture stage will read it."""
    if plan.vanilla is None:
        return load_views(texture, say_nothing)[1]
    vanilla = plan.vanilla
    return load_scene(
        vanilla.source_path,
        size_rule=SugarSize(),
        images_dir=vanilla.images,
        masks=vanilla.mask_options,
        view_options=vanilla.view_options,
        notify=say_nothing,
    )
