# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of ``metrics.py``."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gaussian_splatting.compute import DeviceFlags
from sugar_extractors.mesh.mesh_config import EXTRACTORS, MeshVariant
from sugar_pipeline.model_metrics import MetricsOptions
from sugar_pipeline.pipeline_flags import PresetFlags, apply_presets
from sugar_trainers.coarse_config import MODES, MULTIVIEW
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import FileName, conform
from sugar_utils.settings import flag, from_args, parser_of

_flag = partial(flag, group="metrics")
_SceneConfig = Annotated[dict[FileName, FileName], Meta(min_length=1)]


@dataclass(frozen=True)
class MetricsFlags:
    """What ``metrics.py`` asks beside the options of a measurement."""

    scene_config: str | None = _flag(
        None, "JSON file, or text, that maps each scene folder to its vanilla checkpoint folder"
    )
    mesh_extractor: str | None = _flag(
        None, "how the mesh was made: poisson or tsdf; unset: tsdf with -r multiview, else poisson",
        choices=EXTRACTORS,
    )  # fmt: skip
    use_poisson_center: bool = _flag(False, "the mesh was made of Gaussian centres")
    use_marching_cubes: bool = _flag(False, "the mesh was made by marching cubes")


def metrics_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``metrics.py``."""
    return parser_of(description, MetricsFlags, MetricsOptions, PresetFlags, DeviceFlags)


def metrics_options(args: argparse.Namespace) -> MetricsOptions:
    """Typed form of the flags above."""
    args = apply_presets(args)
    if args.regularization_type is None:
        raise UserError(f"-r/--regularization_type is missing; choose one of {', '.join(MODES)}")
    if args.use_poisson_center and args.use_marching_cubes:
        raise UserError("--use_poisson_center and --use_marching_cubes exclude each other")
    if args.use_uv_texture and args.use_diffuse_color_only:
        raise UserError(
            "--use_uv_texture and --use_diffuse_color_only exclude each other: a texture has no "
            "other colours"
        )
    if args.mesh_extractor == "tsdf" and (args.use_poisson_center or args.use_marching_cubes):
        raise UserError(
            f"--mesh_extractor {args.mesh_extractor} excludes --use_poisson_center and "
            "--use_marching_cubes: a mesh was made in one way"
        )
    return from_args(
        MetricsOptions,
        args,
        scenes=read_scene_config(args.scene_config),
        variant=_variant(args),
        compute=from_args(DeviceFlags, args).choose(),
    )


def _variant(args: argparse.Namespace) -> MeshVariant:
    if args.use_marching_cubes:
        return "marchingcubes"
    if args.use_poisson_center:
        return "poissoncenters"
    usual = "tsdf" if args.regularization_type == MULTIVIEW else "poisson"
    return "tsdf" if (args.mesh_extractor or usual) == "tsdf" else ""


def read_scene_config(text: str | None) -> dict[Path, Path]:
    """Scene folders and their checkpoint folders, from a JSON file or the JSON itself."""
    advice = 'write {"scene folder": "vanilla checkpoint folder", ...}'
    if not text:
        raise UserError(f"--scene_config is missing; {advice}")
    if text.lstrip().startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--scene_config is not JSON ({error}); {advice}") from error
        text = "the given JSON"
    else:
        config = read_json(Path(text))
    pairs = conform(config, _SceneConfig, f"--scene_config {text}", advice)
    return {Path(scene): Path(checkpoint) for scene, checkpoint in pairs.items()}
