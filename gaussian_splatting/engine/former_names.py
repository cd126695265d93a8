# SPDX-License-Identifier: Apache-2.0
"""Settings that once had other names than their flags, so that older runs can be continued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_FORMER = {
    "background_mesh": "background",
    "densification_interval": "interval",
    "densify_from_iter": "start",
    "densify_grad_threshold": "gradient_threshold",
    "densify_until_iter": "stop",
    "eval": "eval_split",
    "feature_lr": "sh",
    "gaussians_per_triangle": "per_triangle",
    "images": "images_dir",
    "lambda_dssim": "dssim_weight",
    "mesh_extractor": "extractor",
    "mesh_neighbors": "n_neighbors",
    "meshing_backend": "backend",
    "opacity_lr": "opacity",
    "poisson_depth": "depth",
    "poisson_linear_fit": "linear_fit",
    "poisson_scale": "scale",
    "poisson_threads": "threads",
    "poisson_width": "width",
    "position_lr_final": "position_final",
    "position_lr_init": "position_init",
    "position_lr_max_steps": "position_steps",
    "postprocess_mesh": "postprocess",
    "project_mesh_on_surface_points": "project_on_surface_points",
    "prune_opacity": "min_opacity",
    "random_seed": "seed",
    "refinement_iterations": "iterations",
    "regularization_type": "regularization",
    "rotation_lr": "rotation",
    "scaling_lr": "scale",
    "sdf_samples": "samples",
    "texture_atlas": "atlas",
    "texture_source": "source",
    "tsdf_depth": "depth",
    "tsdf_truncation": "truncation_voxels",
    "tsdf_voxel_size": "voxel_size",
    "use_vanilla_3dgs": "use_vanilla",
    "vertices_density_quantile": "density_quantile",
}


def with_present_names(saved: Mapping[str, Any], current: Iterable[str]) -> dict[str, Any]:
    """Saved settings under the names of today.

    Args:
        saved: Settings by dotted name.
        current: Dotted names of today's settings.
    """
    wanted = set(current)
    renamed = dict(saved)
    for name in wanted - renamed.keys():
        path, dot, leaf = name.rpartition(".")
        former = f"{path}{dot}{_FORMER.get(leaf, leaf)}"
        if former in renamed and former not in wanted:
            renamed[name] = renamed.pop(former)
    return renamed
