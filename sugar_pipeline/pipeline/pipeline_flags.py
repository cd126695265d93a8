# SPDX-License-Identifier: Apache-2.0
"""Flags of ``train.py`` and ``train_full_pipeline.py``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gaussian_splatting.shared_flags import Preset, preset
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_capture.convert_options import SfmOptions
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.texture.texturing import TextureOptions
from sugar_trainers.coarse_run import CoarseOptions, MultiviewOptions
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_trainers.presets import HIGH_POLY, PresetFlags
from sugar_trainers.refine_run import RefineOptions
from sugar_trainers.stage_config import MODES, MULTIVIEW, CoarseConfig
from sugar_utils.flags import (
    AUTO,
    Automatic,
    FlagValues,
    Parser,
    Repeated,
    open_share,
    optional_str,
    positive_float,
    positive_int,
    positive_or_auto,
)
from sugar_utils.settings import Flag, add_flags, flag, flags_of, parser_of

STAGES = ("convert", "vanilla", "coarse", "mesh", "refine", "texture")  # in their order
SUGAR_STAGES = STAGES[STAGES.index("coarse") :]  # those of ``train.py``

DEMO_FLAGS = (
    "demo",
    "output_dir",
    "minutes",
    "force",
    "stop_after",
    "resume",
    "overwrite",
    "keep_checkpoints",
    "verbose",
    "random_seed",
    "device",
    "gpu",
    "rasterizer",
    "views_per_step",
)

_pipeline = partial(flag, group="pipeline")
_mesh = partial(flag, group="mesh stage")
_train = "only train.py"
_full = "only train_full_pipeline.py"

TRAIN_EXAMPLES = """examples:
  python train.py -s SCENE -c CHECKPOINT -r dn_consistency --high_poly True --refinement_time long
  python train.py --demo
  python train.py --doctor -s SCENE -c CHECKPOINT"""
FULL_EXAMPLES = """examples:
  python train_full_pipeline.py -s PHOTOGRAPHS
  python train_full_pipeline.py -s VIDEO.mp4 -r multiview --high_poly True --refinement_time long
  python train_full_pipeline.py -s SCENE --gs_output_dir CHECKPOINT -r dn_consistency"""
_CAPTURE = ("input", "masks", "depth maps", "image size", "background")
_GROUPS: dict[type, tuple[str, ...]] = {
    CoarseOptions: (
        *_CAPTURE,
        "checkpoint",
        "coarse stage",
        "exposure",
        "memory",
        "run",
        "device",
        "backends",
    ),
    MultiviewOptions: ("multi-view mode", "densification"),
    MeshOptions: ("surface",),
    RefineOptions: ("refinement stage",),
    TextureOptions: ("texture",),
}
"""Headings whose flags the pipelines have, by stage; other flags follow from the stage before."""

_LATER_STAGES = {"mesh": MeshOptions, "refine": RefineOptions, "texture": TextureOptions}
"""Stages that may be left out."""


@dataclass(frozen=True)
class PipelineFlags:
    """Flags of both pipelines that concern the run and not one of its stages."""

    regularization_type: str | None = _pipeline(
        None,
        "how the surface is regularised: multiview gives the best surfaces where photographs "
        "overlap, dn_consistency is the recommended one of SuGaR; unset: in train_full_pipeline.py "
        "what suits the capture, in train.py an error",
        short="-r",
        choices=MODES,
        no_effect_when="with --demo, which takes multiview",
        task="result",
    )
    output_dir: Path = _pipeline(OUTPUT_ROOT, "folder above all results", parse=Path, task="result")
    minutes: float | None = _pipeline(
        None,
        "how long the run may take: image size, lengths of the stages and triangles are "
        "chosen by measured speed; not with --schedule_scale; unset: whole schedules, whose time "
        "is estimated",
        parse=positive_float,
        task="time and memory",
    )
    stop_after: str | None = _pipeline(
        None, "last stage to run; unset: texture", choices=SUGAR_STAGES, task="run"
    )
    force: bool = _pipeline(
        False,
        "go on after a stage whose result is a failure (worse than one constant colour, or "
        "masks that are not filled), which otherwise ends the pipeline with exit code 5",
    )
    export_obj: bool = _pipeline(True, "bake a texture and write OBJ and GLB", short="-t")
    surface_level: float = _mesh(
        0.3,
        "density of the level set that becomes the mesh",
        short="-l",
        parse=open_share,
        no_effect_when="with --mesh_extractor tsdf or tetrahedra",
    )
    n_vertices_in_mesh: int = _mesh(
        HIGH_POLY[0],
        "triangles (not vertices) kept in the foreground, and as many in the background",
        short="-v",
        parse=positive_int,
    )


@dataclass(frozen=True)
class TrainFlags:
    """Flags of ``train.py`` alone."""

    demo: bool = flag(
        False,
        "make a small scene, take it all the way to a textured mesh, on short schedules, "
        "and measure that. Of the other flags, --output_dir, --minutes, --random_seed and those "
        "of the device, checkpoints and resuming act",
        group=_train,
        action="store_true",
        task="run",
    )
    doctor: bool = flag(
        False,
        "look at the machine, and at scene and checkpoint if they are given, and say what "
        "to fix; nothing is trained. Exit code 2 if there is a problem",
        group=_train,
        action="store_true",
        task="run",
    )
    preset: Preset = preset(_train)  # the other pipeline has the vanilla stage's


@dataclass(frozen=True)
class FullFlags:
    """Flags of ``train_full_pipeline.py`` alone, of its vanilla stage."""

    gs_output_dir: Path | None = flag(
        None,
        "start from this vanilla checkpoint instead of training one",
        group=_full,
        parse=lambda text: None if text == "None" else Path(text),
        task="input",
    )
    blocks: Automatic = flag(
        AUTO,
        "cut the capture into so many blocks, which are trained one by one and joined to one "
        "mesh: for captures that do not fit into memory. auto: 1, unless the photographs have more "
        "pixels than fit",
        group=_full,
        parse=positive_or_auto,
        metavar="{N,auto}",
        task="time and memory",
    )
    cluster: str | None = flag(
        None,
        "spread the blocks over workers by Dask: local or local:N starts N on this machine, slurm "
        "and pbs ask a queue for them, an address such as tcp://host:8786 is that of a scheduler; "
        "unset: one block after the other",
        group=_full,
        parse=optional_str,
        metavar="{local,slurm,pbs,ADDRESS}",
        no_effect_when="with one block",
        task="time and memory",
    )
    vanilla_iterations: int = flag(
        7_000,
        "length of the vanilla stage, and the iteration that SuGaR starts from",
        group=_full,
        parse=positive_int,
        task="time and memory",
    )


def train_parser(description: str | None) -> Parser:
    """Make the parser of ``train.py``."""
    parser = parser_of(description, examples=TRAIN_EXAMPLES)
    texture = {"group": _train, "long": "--export_uv_textured_mesh"}
    _add_pipeline_flags(parser, texture)
    add_flags(parser, TrainFlags)
    return parser


def full_parser(description: str | None) -> Parser:
    """Make the parser of ``train_full_pipeline.py``."""
    parser = parser_of(description, examples=FULL_EXAMPLES)
    # The checkpoint is that of the vanilla stage.
    parser.set_defaults(checkpoint_path=None, iteration_to_load=None)
    several = {"options": {"action": Repeated}}
    _add_pipeline_flags(parser, {"group": _full}, without=("checkpoint",), scene=several)
    add_flags(parser, FullFlags, _full, "vanilla stage")
    add_flags(parser, VanillaOptions, _full, "vanilla stage")
    add_flags(parser, SfmOptions)
    return parser


def _add_pipeline_flags(
    parser: argparse.ArgumentParser,
    texture: Mapping[str, object],
    without: tuple[str, ...] = (),
    scene: Mapping[str, object] | None = None,
) -> None:
    add_flags(parser, PipelineFlags, export_obj=texture)
    for settings, groups in _GROUPS.items():
        included = [group for group in groups if group not in without]
        add_flags(parser, settings, *included, scene_path=scene or {})
    add_flags(parser, PresetFlags)


def runs_stage(flags: FlagValues, stage: str) -> bool:
    """Whether a stage runs under ``--stop_after`` and ``-t``."""
    if stage == "texture" and not flags["export_obj"]:
        return False
    return flags["stop_after"] is None or STAGES.index(stage) <= STAGES.index(flags["stop_after"])


def messages(flags: FlagValues) -> tuple[str, ...]:
    """One line for each group of given flags that has no effect because of another flag."""
    lines = []
    for stage, settings in _LATER_STAGES.items():
        declarations = list(flags_of(settings, *_GROUPS[settings]))
        if stage == "mesh":
            declarations = [*flags_of(PipelineFlags, "mesh stage"), *declarations]
        changed = _changed(flags, declarations)
        if changed and not runs_stage(flags, stage):
            lines.append(f"{', '.join(changed)}: no effect, the {stage} stage does not run")
    if flags["regularization_type"] == MULTIVIEW:
        unused = _changed(flags, flags_of(CoarseConfig, "coarse stage"))
        if unused:
            lines.append(f"{', '.join(unused)}: no effect with multiview")
    if flags["low_poly"] and flags["high_poly"]:
        lines.append("--low_poly has no effect beside --high_poly")
    return tuple(lines)


def _changed(flags: FlagValues, declarations: Iterable[Flag]) -> list[str]:
    """The flags with values other than the defaults, as typed."""
    return [f"--{one.name}" for one in declarations if flags[one.name] != one.default]
