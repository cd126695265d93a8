# SPDX-License-Identifier: Apache-2.0
"""The flags of the mesh stage, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial

from gaussian_splatting.compute import DeviceFlags
from gaussian_splatting.engine.run_directory import RUN_FILE
from sugar_extractors.mesh.mesh_config import DECIMATION_TARGETS, SURFACE_LEVELS, MeshOptions
from sugar_utils.errors import UserError
from sugar_utils.flags import non_negative_float, positive_int
from sugar_utils.schemas import RunRecord, read_checked
from sugar_utils.settings import flag, from_args, parser_of

_alone = partial(flag, group="only extract_mesh.py")


@dataclass(frozen=True)
class MeshScriptFlags:
    """Which meshes ``extract_mesh.py`` makes; the pipelines make one."""

    surface_level: float | None = _alone(
        None, f"density of the surface; unset: {SURFACE_LEVELS}, a mesh each", short="-l",
        parse=non_negative_float, no_effect_when="with --mesh_extractor tsdf",
    )  # fmt: skip
    decimation_target: int | None = _alone(
        None, f"triangles of the foreground and of the background; unset: {DECIMATION_TARGETS}, a "
        "mesh each", short="-d", parse=positive_int,
    )  # fmt: skip
    use_centers_to_extract_mesh: bool = _alone(
        False, "ablation of the paper, not offered: True is an error"
    )
    use_marching_cubes: bool = _alone(
        False, "ablation of the paper, not offered: True is an error; --mesh_extractor tsdf gives "
        "a surface without Poisson",
    )  # fmt: skip

    @property
    def choices(self) -> dict[str, object]:
        """Fields of ``MeshOptions`` that follow from the flags above."""
        for name in ("use_centers_to_extract_mesh", "use_marching_cubes"):
            if getattr(self, name):
                raise UserError(
                    f"--{name}: this ablation of the paper is not offered, its surfaces are worse; "
                    "leave it out, or pass --mesh_extractor tsdf for a surface without Poisson"
                )
        chosen: dict[str, object] = {}
        if self.surface_level is not None:
            chosen["surface_levels"] = (self.surface_level,)
        if self.decimation_target is not None:
            chosen["decimation_targets"] = (self.decimation_target,)
        return chosen


def mesh_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``extract_mesh.py``."""
    return parser_of(description, MeshOptions, MeshScriptFlags, DeviceFlags)


def mesh_options(args: argparse.Namespace) -> MeshOptions:
    """The extraction that was asked for."""
    chosen = from_args(MeshScriptFlags, args).choices
    args = _of_model(args)
    return replace(
        from_args(MeshOptions, args, **chosen), compute=from_args(DeviceFlags, args).choose()
    )


def _of_model(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with the mode that the coarse model was trained in."""
    resolved = argparse.Namespace(**vars(args))
    if args.coarse_model_path is None or args.use_vanilla_3dgs:
        return resolved
    path = args.coarse_model_path
    record = (path if path.is_dir() else path.parent) / RUN_FILE
    if record.is_file():
        settings = read_checked(record, RunRecord).get("settings", {})
        resolved.regularization_type = settings.get("regularization_type")
    return resolved
