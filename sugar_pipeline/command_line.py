# SPDX-License-Identifier: Apache-2.0
"""The command ``sugar VERB ...``, and the same programs as scripts of the original's names.

Nothing heavy is imported before it is known what runs: ``sugar --help`` is there at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sugar_utils import __version__
from sugar_utils.command_text import SCRIPTS
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import Notify, OtherSettings, UserError, say_nothing
from sugar_utils.torchrun import is_follower

if TYPE_CHECKING:
    from sugar_utils.flags import FlagValues, Parser

_SCENE_FLAGS = ("-s", "--scene_path", "--scene-path", "--source_path", "--source-path")
_STAGE = "sugar_pipeline.pipeline.watched_stage:run_watched_stage"
_COARSE = "sugar_trainers.coarse_run:CoarseOptions"
_MULTIVIEW = "sugar_trainers.coarse_run:MultiviewOptions"
_COARSE_SETTINGS = {"density": _COARSE, "sdf": _COARSE, "multiview": _MULTIVIEW}
"""Settings of the coarse stage in each mode that has a script."""
_RUN_TRAIN = "sugar_pipeline.commands:run_train"
_RUN_FULL = "sugar_pipeline.commands:run_full"
_TRAIN_PARSER = "sugar_pipeline.pipeline.pipeline_flags:train_parser"
_FULL_PARSER = "sugar_pipeline.pipeline.pipeline_flags:full_parser"


@dataclass(frozen=True)
class Program:
    """A verb of ``sugar``, and the script that does the same where there is one.

    Functions and dataclasses that it needs are named as ``module:name`` and imported when it runs.
    """

    script: str  # its path in the repository; empty: none
    help: str
    run: str  # gets the settings
    settings: str = ""  # a dataclass, or a function of what was parsed; unset: ``run`` gets that
    parser: str = ""  # a dataclass of flags, or makes the parser of a description; unset: settings
    chosen: Mapping[str, object] = field(default_factory=dict)  # values that its flags begin with
    takes_results: bool = False  # whether words without a flag are results, and not the scene

    def make_parser(self, description: str | None) -> Parser:
        """Make the parser of the program's flags."""
        with _without_collections():
            from sugar_utils.settings import parser_of

            source = _named(self.parser or self.settings)
        is_settings = isinstance(source, type)
        parser = parser_of(description, source) if is_settings else source(description)
        parser.set_defaults(**self.chosen)
        return parser

    def start(self, description: str | None, verb: str = "") -> None:
        """Parse the flags of the command line and run; a verb is its first word."""
        words = sys.argv[2:] if verb else sys.argv[1:]
        check_early(words, self)
        parser = self.make_parser(description)
        if verb:
            parser.prog = f"sugar {verb}"
        if verb and self.script:
            parser.epilog = (parser.epilog or "").replace(f"python {self.script}", parser.prog)
        self.call(parser.parse_flags(words))

    def call(self, flags: FlagValues, **more: Any) -> object:
        """Run the program with parsed flags; return the result of its function.

        Args:
            flags: Of the program's parser.
            more: Further keywords of the function, such as ``console``.
        """
        from sugar_utils.settings import changed_flags, write_settings

        if not flags.get("demo"):
            console = more.get("console")
            flags = with_scene_folders(flags, None if console is None else console.info)
        settings = self._settings_of(flags)
        try:
            result = _named(self.run)(settings, **more)
        except OtherSettings as error:
            raise error.in_flags(changed_flags(error.path, flags.given)) from error
        if self.run == _STAGE and not is_follower():
            # Only the vanilla stage has one.
            model_path = getattr(settings, "model_path", None)
            folder = result.parent if model_path is None else model_path / "checkpoints"
            write_settings(folder, flags.given)
        return result

    def _settings_of(self, flags: FlagValues) -> object:
        """The argument of the program's function."""
        from sugar_utils.settings import from_args

        if not self.settings:
            return flags
        source = _named(self.settings)
        return from_args(source, flags) if isinstance(source, type) else source(flags)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Switch the garbage collector off: it takes a fifth of the time of importing torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_early(words: Sequence[str], program: Program) -> None:
    """Refuse scenes that are not there before torch is loaded, which takes seconds.

    Only the parser can separate flags from values, so only plain cases are checked.

    Raises:
        UserError: The one scene of the command line does not exist.
    """
    from gaussian_splatting.scenes.scene_path import check_scene_path

    without_scene = {"--demo", "-h", "--help", "--help_all"} & set(words)
    if program.takes_results or program.chosen.get("demo") or without_scene:
        return
    # Words before the first flag are scenes, too.
    scenes = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    scenes += [
        value
        for word, value in itertools.pairwise(words)
        if word in _SCENE_FLAGS and not value.startswith("-")
    ]
    # Of several scenes one that is not there stops none of the others.
    if len(scenes) == 1:
        check_scene_path(Path(scenes[0]))


def with_scene_folders(flags: FlagValues, notify: Notify | None = None) -> FlagValues:
    """Check the paths of scenes, and replace a ZIP file by its folder.

    Several scenes are checked when their turn comes.

    Args:
        notify: Gets a line about a ZIP file; None: the first process prints it.
    """
    from gaussian_splatting.scenes.scene_path import (
        ZIP_SUFFIXES,
        output_folders,
        scene_folder,
    )

    # Pages and exports of results do without their scene.
    needs_scene = "results" not in flags and "result" not in flags
    scenes = flags.get("all_scene_path", [])
    if len(scenes) > 1:
        return flags
    if notify is None:
        notify = say_nothing if is_follower() else print
    changes: dict[str, object] = {}
    for name in ("scene_path", "source_path"):
        path = flags.get(name)
        if isinstance(path, Path) and (needs_scene or path.suffix.lower() in ZIP_SUFFIXES):
            changes[name] = scene_folder(path, output_folders(flags), notify)
    if scenes:
        changes["all_scene_path"] = [changes["scene_path"]]
    return flags.replaced(**changes)


def _named(place: str) -> Callable[..., Any]:
    """Import what ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


VERBS: dict[str, Program] = {
    "demo": Program(
        SCRIPTS["train"],
        "make a small scene, take it through all stages, measure the mesh",
        _RUN_TRAIN,
        parser=_TRAIN_PARSER,
        chosen={"demo": True},
    ),
    "run": Program(
        SCRIPTS["run"],
        "photographs or a video to a textured mesh",
        _RUN_FULL,
        parser=_FULL_PARSER,
    ),
    "train": Program(
        SCRIPTS["train"],
        "a 3DGS checkpoint to a textured mesh",
        _RUN_TRAIN,
        parser=_TRAIN_PARSER,
    ),
    "convert": Program(
        SCRIPTS["convert"],
        "camera poses of photographs or a video",
        "sugar_capture.conversion.convert_run:convert",
        "sugar_capture.convert_options:ConvertOptions",
    ),
    "vanilla": Program(
        SCRIPTS["vanilla"],
        "vanilla 3D Gaussian splatting",
        _STAGE,
        "gaussian_splatting.vanilla.vanilla_run:VanillaOptions",
        "gaussian_splatting.vanilla.vanilla_run:vanilla_parser",
    ),
    "mesh": Program(
        SCRIPTS["mesh"],
        "a coarse model to a mesh",
        "sugar_extractors.mesh.extraction:extract_coarse_mesh",
        "sugar_extractors.mesh.mesh_config:mesh_options",
        "sugar_extractors.mesh.mesh_config:MeshOptions",
    ),
    "refine": Program(
        SCRIPTS["refine"],
        "refine a mesh and the Gaussians bound to it",
        _STAGE,
        "sugar_trainers.refine_run:RefineOptions",
    ),
    "texture": Program(
        SCRIPTS["texture"],
        "a refined model to a textured mesh",
        "sugar_extractors.texture.texturing:extract_textured_mesh",
        "sugar_extractors.texture.texturing:TextureOptions",
        "sugar_extractors.texture.texturing:texture_parser",
    ),
    "view": Program(
        "",
        "results on a page in the browser",
        "sugar_viewer.view_run:view",
        "sugar_viewer.view_run:ViewOptions",
        takes_results=True,
    ),
    "render": Program(
        "",
        "pictures or a video of results",
        "sugar_viewer.render_run:render_results",
        "sugar_viewer.render_run:RenderOptions",
        takes_results=True,
    ),
    "export": Program(
        "",
        "a result in the format of another program",
        "sugar_extractors.export.export_run:export",
        "sugar_extractors.export.export_options:ExportOptions",
        "sugar_extractors.export.export_options:export_parser",
        takes_results=True,
    ),
    "metrics": Program(
        SCRIPTS["metrics"],
        "measure refined models on held-out views",
        "sugar_pipeline.quality.model_metrics:measure",
        "sugar_pipeline.quality.model_metrics:metrics_options",
        "sugar_pipeline.quality.model_metrics:metrics_parser",
        takes_results=True,
    ),
    "scan": Program(
        "",
        "bring a laser scan from a map to the world of a capture",
        "sugar_maps.scan_placing:place_scan",
        "sugar_maps.scan_placing:ScanOptions",
        takes_results=True,
    ),
    "targets": Program(
        "",
        "numbered targets to print, for the scale of a capture",
        "sugar_maps.target_sheets:write_target_sheet",
        "sugar_maps.target_sheets:TargetSheetOptions",
        takes_results=True,
    ),
    "doctor": Program(
        SCRIPTS["train"],
        "check the installation, and scene and checkpoint if given",
        _RUN_TRAIN,
        parser=_TRAIN_PARSER,
        chosen={"doctor": True},
    ),
}


def _programs() -> dict[str, Program]:
    """Collect the programs of all verbs, and the coarse stages, which have scripts alone."""
    programs = {
        program.script or verb: program for verb, program in VERBS.items() if not program.chosen
    }
    for mode, settings in _COARSE_SETTINGS.items():
        script = f"train_coarse_{mode}.py"
        chosen = {"regularization_type": mode}
        programs[script] = Program(script, "", _STAGE, settings, chosen=chosen)
    return programs


PROGRAMS = _programs()
"""Programs by the path of their script in the repository, or by their verb if they have none."""


def main_of(name: str, description: str | None) -> Callable[[], None]:
    """Make the main function of a program of ``PROGRAMS``."""

    def main() -> None:
        PROGRAMS[name].start(description)

    return main


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run the main function of a script, and exit with its exit code."""
    sys.exit(run_main(main))


def main() -> None:
    """Run the verb that is the first word of the command line."""
    verb, *rest = sys.argv[1:] or ["--help"]
    if verb in VERBS:
        VERBS[verb].start(f"sugar {verb}: {VERBS[verb].help}.", verb)
    elif verb in ("-h", "--help", "help"):
        print("usage: sugar VERB [flags]; sugar VERB --help lists the flags of a verb\n\nverbs:")
        for name, program in VERBS.items():
            print(f"  {name:<9} {program.help}")
        print("\n  --version, --print_completion SHELL (needs the package shtab)")
    elif verb == "--version":
        print(f"sugar {__version__}")
    elif verb == "--print_completion":
        print(_completion(*rest[:1]))
    else:
        similar = difflib.get_close_matches(verb, VERBS, n=1)
        advice = f"did you mean {similar[0]}?" if similar else f"choose one of {', '.join(VERBS)}"
        raise UserError(f"sugar has no verb {verb!r}; {advice}")


def _completion(shell: str = "bash") -> str:
    """Make a script that completes verbs, flags and file names in a shell."""
    from sugar_utils.libraries import load_package

    (shtab,) = load_package("--print_completion", "shtab", "shtab")
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(
            f"no completion for {shell!r}; there is {', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    parser = argparse.ArgumentParser(prog="sugar")
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, program in VERBS.items():
        verb_parser = program.make_parser(None)
        verbs.add_parser(name, parents=[verb_parser], add_help=False, help=program.help)
        for action in verb_parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def entry() -> int:
    """Run the installed command ``sugar``; return its exit code."""
    return run_main(main)
