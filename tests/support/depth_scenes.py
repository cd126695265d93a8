# SPDX-License-Identifier: Apache-2.0
"""Scenes with depth maps, read as a run reads them."""

from __future__ import annotations

from pathlib import Path

from gaussian_splatting.data.maps.depth_maps import DepthOptions, KnownDepths
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.scenes.scene import VanillaSize, load_scene


def load(root: Path, **depths: object) -> tuple[KnownDepths, list[str]]:
    """The depth maps of a scene, and what is told about them."""
    lines: list[str] = []
    scene = load_scene(
        root,
        size_rule=VanillaSize(),
        eval_split=False,
        masks=MaskOptions(),
        depths=DepthOptions(**depths),
        view_options=ViewOptions(min_observations=0),
        notify=lines.append,
    )
    return scene.depths, [line for line in lines if "depth map" in line]
