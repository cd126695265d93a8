# SPDX-License-Identifier: Apache-2.0
"""Every flag of the pipelines reaches every stage that it is for, and no other."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sugar_pipeline.pipeline.pipeline_flags import full_parser, train_parser
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_utils.flags import FlagValues, Parser, automatic_boolean, config_text

STAGES = {"v": "vanilla", "c": "coarse", "m": "mesh", "r": "refine", "t": "texture"}

STAGES_OF_FLAGS = {
    "vcmrt": "scene_path eval images resolution_factor img_resolution img_size_limit output_dir "
    "schedule_scale vanilla_iterations overwrite random_seed masks mask_mode "
    "min_observations keep_views preset",
    # Of meshes only the silhouette of the Gaussians counts, not what is behind them.
    "vcrt": "white_background",
    "vcr": "checkpoint_interval optimizer_state use_bfloat16 resume keep_checkpoints "
    "views_per_step gradient_accumulation accumulation_steps use_gradient_checkpointing "
    "exposure_compensation viewer viewer_host vram_budget sh_on_host verbose",
    "v": "init_ply refine_poses robust init densification growing_resolution transients",
    "vc": "max_gaussians depths depth_weight depth_unit",
    "c": "full_res_normals sdf_samples knn_batch_size checkpoint_milestones test_iterations "
    "multiview_pixels cutoff_deviations normals normal_weight",
    # Later stages read a file that is named after the last iteration.
    "cmr": "short_multiview",
    "cmrt": "regularization_type checkpoint_path iteration_to_load",
    "mrt": "low_poly high_poly surface_level n_vertices_in_mesh mesh_extractor",
    "m": "project_mesh_on_surface_points center_bbox background_mesh surface_points "
    "poisson_depth poisson_threads vertices_density_quantile max_gap tsdf_depth tsdf_voxel_size "
    "tsdf_margin meshing_backend watertight fill_holes remove_unseen "
    "photometric_refinement mesh_error "
    "triangle_pixels",
    "mr": "bboxmin bboxmax",
    "rt": "refinement_time gaussians_per_triangle refinement_iterations",
    "r": "export_ply refine_surface_terms keep_background initial_colors initial_shapes "
    "antialiased",
    "t": "square_size texture_size texture_atlas texture_source postprocess_mesh "
    "postprocess_density_threshold postprocess_iterations export_glb lit orient scale_factor "
    "known_distance",
    # Where and by whom things are computed is tested in test_device.py.
    # How cameras are found is tested in test_convert.py, and in test_pipeline.py that it is asked.
    "": "frames camera cameras masked_features extraction_size max_features matcher mapper "
    "features feature_weights "
    "panoramas photographer "
    "device gpu rasterizer cuda_graph stop_after force export_obj gs_output_dir demo doctor "
    # What blocks do is tested in test_blocks_run.py.
    "config_file minutes blocks cluster",
}
"""Stages, by their initials, and the flags that change what they do."""

VALUES = {
    "bboxmin": "(-1,-1,-1)",
    "bboxmax": "(1,1,1)",
    "refinement_time": "medium",
    "resume": "none",
    "surface_level": "0.4",
    "checkpoint_milestones": "8000",
    "test_iterations": "8000",
    "img_size_limit": "800",
    "n_vertices_in_mesh": "1234",
    "gradient_accumulation": "True",
    "sh_on_host": "True",
    "use_gradient_checkpointing": "True",
    "center_bbox": "True",
    "refine_surface_terms": "True",
    "mesh_extractor": "tsdf",
    "tsdf_depth": "plane",
    "exposure_compensation": "True",
    "vertices_density_quantile": "0.05",
    "robust": "False",
    "transients": "False",
    "growing_resolution": "True",
    "remove_unseen": "False",
    "keep_background": "False",
    "initial_colors": "mesh",
    "initial_shapes": "circles",
    "antialiased": "False",
    "short_multiview": "True",
    "square_size": "9",
    "high_poly": "True",
    "known_distance": "a.jpg b.jpg 2",
    "scene_path": "other",
    "checkpoint_path": "other",
    "gs_output_dir": "None",
    "masked_features": "True",
    "panoramas": "True",
}
"""Values that the general rule does not find."""

BESIDE = {
    "bboxmin": ["--bboxmax", "(1,1,1)"],
    "bboxmax": ["--bboxmin", "(-1,-1,-1)"],
    "accumulation_steps": ["--gradient_accumulation", "True"],
    "high_poly": ["-v", "5000", "-g", "3"],
    **dict.fromkeys(
        ("max_gaussians", "multiview_pixels", "cutoff_deviations", "short_multiview"),
        ["-r", "multiview"],
    ),
}
"""Flags that another one acts with only, in both plans that are compared."""

OWN_MEANING = {
    # Of the folder above all results each stage has its own below.
    *((stage, "output_dir") for stage in ("coarse", "refine")),
    # The checkpoint that the vanilla stage makes, of so many iterations.
    *((stage, name) for stage in STAGES.values() for name in ("checkpoint_path", "scene_path")),
    # No photographs are measured while vanilla trains, and None means its own folder.
    ("vanilla", "test_iterations"),
    ("vanilla", "images"),
    # Only the stage that made a checkpoint continues it.
    ("vanilla", "resume"),
    ("refine", "resume"),
    # When and how the number of Gaussians changes; the flag is a field of the score's settings.
    ("vanilla", "densification"),
}
"""Fields of the same name as a flag whose value follows from it and is not it."""

IN_PAPER_ITERATIONS = {"checkpoint_interval": ("vanilla",), "schedule_scale": ("refine",)}

SCRIPTS = {
    "train.py": (train_parser, ["-s", "scene", "-c", "vanilla", "-r", "density"]),
    "train_full_pipeline.py": (full_parser, ["-s", "scene", "-r", "density"]),
}


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        a for a in parser._actions if a.option_strings and a.dest not in ("help", argparse.SUPPRESS)
    ]


def other_value(action: argparse.Action) -> str:
    """A value that is not the default."""
    default = action.default
    if action.dest in VALUES:
        return VALUES[action.dest]
    if action.choices:
        return str(next(choice for choice in action.choices if choice != default))
    if isinstance(default, bool):
        return str(not default)
    if isinstance(default, int):
        return str(default + 1)
    if isinstance(default, float):
        return str(default / 2 if default > 0.25 else default + 0.25)
    return "other" if action.type in (Path, None) else "2"


def declared(name: str) -> str:
    (stages,) = [stages for stages, names in STAGES_OF_FLAGS.items() if name in names.split()]
    return stages


@functools.cache
def parser_of(script: str) -> Parser:
    return SCRIPTS[script][0](None)


def parsed(script: str, *words: str) -> FlagValues:
    return parser_of(script).parse_flags([*SCRIPTS[script][1], *words])


@functools.cache
def planned(script: str, *words: str) -> PipelinePlan:
    return plan_of(parsed(script, *words))


CASES = [
    pytest.param(script, action, id=f"{script} --{action.dest}")
    for script in SCRIPTS
    for action in flags_of(parser_of(script))
    if declared("export_obj" if action.dest == "export_uv_textured_mesh" else action.dest)
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "action"), CASES)
def test_a_flag_changes_the_settings_of_the_stages_it_is_for(script, action):
    beside = BESIDE.get(action.dest, [])
    flag = next(flag for flag in action.option_strings if flag.startswith("--"))
    # A box has two corners or none.
    before = planned(script, *([] if action.dest.startswith("bbox") else beside))
    after = planned(script, *beside, flag, *other_value(action).split(" "))
    changed = {
        initial
        for initial, stage in STAGES.items()
        if getattr(after, stage) != getattr(before, stage)
    }
    present = {initial for initial, stage in STAGES.items() if getattr(before, stage) is not None}
    assert changed == set(declared(action.dest)) & present


def fields_named(settings: object, name: str) -> Iterator[object]:
    """Values of the fields of this name in settings and in the settings within them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name == name:
            yield value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from fields_named(value, name)


@pytest.mark.parametrize(("script", "action"), CASES)
def test_a_stage_that_has_the_field_of_a_flag_holds_its_value(script, action):
    flag = next(flag for flag in action.option_strings if flag.startswith("--"))
    words = [*BESIDE.get(action.dest, []), flag, *other_value(action).split(" ")]
    plan, value = planned(script, *words), parsed(script, *words)[action.dest]
    for stage in STAGES.values():
        settings = getattr(plan, stage)
        if settings is None or (stage, action.dest) in OWN_MEANING:
            continue
        held = list(fields_named(settings, action.dest))
        if action.dest in IN_PAPER_ITERATIONS and stage in IN_PAPER_ITERATIONS[action.dest]:
            continue
        expected = tuple(value) if isinstance(value, list) else value
        assert all(one == expected for one in held), f"{stage}: {held}"


def test_every_flag_is_declared_once():
    names = " ".join(STAGES_OF_FLAGS.values()).split()
    assert len(names) == len(set(names))
    existing = {action.dest for script in SCRIPTS for action in flags_of(parser_of(script))}
    assert existing == set(names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_of_settings_repeats_every_flag(script, tmp_path):
    """The run's ``settings.toml`` gives the same settings as its flags."""
    parser, file = parser_of(script), tmp_path / "settings.toml"
    for action in flags_of(parser):
        if action.dest == "config_file":
            continue
        flag = next(flag for flag in action.option_strings if flag.startswith("--"))
        is_true = action.type is automatic_boolean
        value = [] if action.nargs == 0 else ["True"] if is_true else other_value(action).split(" ")
        flags = parser.parse_flags([flag, *value])
        assert set(flags.given) <= {action.dest}
        file.write_text(config_text(flags.given, "a run"))
        assert parser.parse_flags(["--config", str(file)]) == flags, action.dest


def test_an_image_size_that_is_asked_for_is_that_of_all_stages():
    plan = planned("train_full_pipeline.py", "--img_size_limit", "800")
    sizes = {stage.size.target(2000, 1500) for stage in (plan.vanilla, plan.coarse, plan.refine)}
    assert sizes == {(800, 600)}
