# SPDX-License-Identifier: Apache-2.0
"""What is asked of the last stage and needs the capture: refused before the first one starts."""

from __future__ import annotations

from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.posing.photographs import described_photographs, output_names
from gaussian_splatting.posing.scene_folder import find_source
from sugar_extractors.texture.placed_export import check_names, scale_of
from sugar_pipeline.plan import PipelinePlan
from sugar_trainers.capture import load_views
from sugar_trainers.image_size import SugarSize


def check_names_of_photographs(plan: PipelinePlan) -> None:
    """Before cameras are looked for: whether the photographs that give the scale exist at all.

    Those of a video are frames that nobody knows yet.

    Raises:
        UserError: One does not.
    """
    if plan.convert is None or plan.texture is None:
        return
    source = find_source(plan.convert.source_path)
    if source.video is None and plan.texture.placement.known_distance is not None:
        photographs = described_photographs(source.folder, source.recursive)
        check_names(plan.texture.placement, list(output_names(photographs)))


def check_places(plan: PipelinePlan) -> None:
    """As soon as there are cameras: whether those that give the scale are among them.

    Raises:
        UserError: One is not, or both stand in one place.
    """
    if plan.texture is None or plan.texture.placement.known_distance is None:
        return
    scene = _capture(plan)
    scale_of(scene.calibrated_cameras, plan.texture.placement)


def _capture(plan: PipelinePlan) -> Scene:
    """The scene as the texture stage will read it."""
    if plan.vanilla is None:
        return load_views(plan.texture, _silent)[1]
    vanilla = plan.vanilla
    return load_scene(
        vanilla.source_path,
        size_rule=SugarSize(),
        images_dir=vanilla.images,
        masks=vanilla.mask_options,
        view_options=vanilla.view_options,
        notify=_silent,
    )


def _silent(line: str) -> None:
    """What is to be said about the scene its stages say."""
