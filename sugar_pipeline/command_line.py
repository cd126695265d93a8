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
from typing import Any, NoReturn

from sugar_utils import __version__
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.torchrun import is_follower

_SCENE_FLAGS = ("-s", "--scene_path", "--scene-path", "--source_path", "--source-path")
_STAGE = "sugar_viewer.live_view:run_watched_stage"
_COARSE = "sugar_trainers.coarse_run:CoarseOptions"


@dataclass(frozen=True)
class Program:
    """A script and the verb that does the same; what it needs is named as ``module:name``."""

    script: str
    help: str
    run: str
    settings: str = ""  # a dataclass, or a function of what was parsed; unset: ``run`` gets that
    parser: str = ""  # a dataclass of flags, or makes the parser of a description; unset: settings
    chosen: Mapping[str, Any] = field(default_factory=dict)  # values that its flags begin with
    takes_results: bool = False  # whether words without a flag are results, and not the scene

    def make_parser(self, description: str | None) -> argparse.ArgumentParser:
        with _without_collections():
            from sugar_utils.settings import parser_of

            made = _named(self.parser or self.settings)
        parser = parser_of(description, made) if isinstance(made, type) else made(description)
        parser.set_defaults(**self.chosen)
        return parser

    def start(self, description: str | None, verb: str = "") -> None:
        """Parse the flags of the command line and run; a verb is its first word."""
        words = sys.argv[2:] if verb else sys.argv[1:]
        check_early(words, self)
        parser = self.make_parser(description)
        if verb:
            parser.prog = f"sugar {verb}"
            parser.epilog = (parser.epilog or "").replace(f"python {self.script}", parser.prog)
        self.call(parser, parser.parse_args(words))

    def call(self, parser: argparse.ArgumentParser, args: argparse.Namespace, **more: Any) -> Any:
        from sugar_utils.settings import from_args, given_flags, write_settings

        if not getattr(args, "demo", False):
            args = with_scene_folders(args)
        made = _named(self.settings) if self.settings else lambda args: args
        settings = from_args(made, args) if isinstance(made, type) else made(args)
        result = _named(self.run)(settings, **more)
        if self.run == _STAGE and not is_follower():
            is_vanilla = hasattr(settings, "model_path")
            folder = settings.model_path / "checkpoints" if is_vanilla else result.parent
            write_settings(folder, given_flags(args, parser))
        return result


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A context in which no garbage is collected: a fifth of the time in which torch is loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_early(words: Sequence[str], program: Program) -> None:
    """Refuse scenes that are not there before torch is loaded, which takes seconds.

    What is a flag and what is its value only the parser knows, so this looks at plain cases alone.
    """
    from gaussian_splatting.data.scene_path import check_scene_path

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


def with_scene_folders(args: argparse.Namespace) -> argparse.Namespace:
    """Check the paths of scenes, and put the folder of a ZIP file in place of that.

    Several scenes are looked at when their turn comes.
    """
    from gaussian_splatting.data.scene_path import ZIP_SUFFIX, output_folders, scene_folder
    from sugar_utils.settings import with_flags

    # Pages and exports of results do without their scene.
    needs_scene = not hasattr(args, "results") and not hasattr(args, "result")
    every = getattr(args, "all_scene_path", [])
    if len(every) > 1:
        return args
    notify = (lambda line: None) if is_follower() else print
    changes: dict[str, Any] = {}
    for name in ("scene_path", "source_path"):
        path = getattr(args, name, None)
        if isinstance(path, Path) and (needs_scene or path.suffix.lower() == ZIP_SUFFIX):
            changes[name] = scene_folder(path, output_folders(args), notify)
    if every:
        changes["all_scene_path"] = [changes["scene_path"]]
    return with_flags(args, **changes)


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


_COMMANDS = "sugar_pipeline.commands"
_FLAGS = "sugar_pipeline.pipeline_flags"
_TRAIN = (f"{_COMMANDS}:run_train", "", f"{_FLAGS}:train_parser")
VERBS: dict[str, Program] = {
    "demo": Program(
        "train.py",
        "make a small scene, take it through all stages, measure the mesh",
        *_TRAIN,
        {"demo": True},
    ),
    "run": Program(
        "train_full_pipeline.py",
        "photographs or a video to a textured mesh",
        f"{_COMMANDS}:run_full",
        "",
        f"{_FLAGS}:full_parser",
    ),
    "train": Program("train.py", "a 3DGS checkpoint to a textured mesh", *_TRAIN),
    "convert": Program(
        "gaussian_splatting/convert.py",
        "camera poses of photographs or a video",
        "sugar_capture.convert_run:convert",
        "sugar_capture.convert_options:ConvertOptions",
    ),
    "vanilla": Program(
        "gaussian_splatting/train.py",
        "vanilla 3D Gaussian splatting",
        _STAGE,
        "gaussian_splatting.vanilla.vanilla_run:VanillaOptions",
        "gaussian_splatting.vanilla.vanilla_run:vanilla_parser",
    ),
    "mesh": Program(
        "extract_mesh.py",
        "a coarse model to a mesh",
        "sugar_extractors.mesh.extraction:extract_coarse_mesh",
        "sugar_extractors.mesh.mesh_config:mesh_options",
        "sugar_extractors.mesh.mesh_config:MeshOptions",
    ),
    "refine": Program(
        "train_refined.py",
        "refine a mesh and the Gaussians bound to it",
        _STAGE,
        "sugar_trainers.refine_run:RefineOptions",
    ),
    "texture": Program(
        "extract_refined_mesh_with_texture.py",
        "a refined model to a textured mesh",
        "sugar_extractors.texture.texturing:extract_textured_mesh",
        "sugar_extractors.texture.texturing:TextureOptions",
        "sugar_extractors.texture.texturing:texture_parser",
    ),
    "view": Program(
        "view.py",
        "results on a page in the browser",
        "sugar_viewer.view_run:view",
        "sugar_viewer.view_run:ViewOptions",
        takes_results=True,
    ),
    "render": Program(
        "render.py",
        "pictures or a video of results",
        "sugar_viewer.render_run:render_results",
        "sugar_viewer.render_run:RenderOptions",
        takes_results=True,
    ),
    "export": Program(
        "export.py",
        "a result in the format of another program",
        "sugar_extractors.export.export_run:export",
        "sugar_extractors.export.export_run:ExportOptions",
        "sugar_extractors.export.export_run:export_parser",
        takes_results=True,
    ),
    "metrics": Program(
        "metrics.py",
        "measure refined models on held-out views",
        "sugar_pipeline.model_metrics:measure",
        "sugar_pipeline.model_metrics:metrics_options",
        "sugar_pipeline.model_metrics:metrics_parser",
        takes_results=True,
    ),
    "doctor": Program(
        "train.py",
        "check the installation, and scene and checkpoint if given",
        *_TRAIN,
        {"doctor": True},
    ),
}

PROGRAMS: dict[str, Program] = {
    **{program.script: program for program in VERBS.values() if not program.chosen},
    **{
        f"train_coarse_{mode}.py": Program(
            "", "", _STAGE, settings, chosen={"regularization_type": mode}
        )
        for mode, settings in (
            ("density", _COARSE),
            ("sdf", _COARSE),
            ("multiview", "sugar_trainers.coarse_run:MultiviewOptions"),
        )
    },
}
"""What each script runs, by its path in the repository."""


def main_of(name: str, description: str | None) -> Callable[[], None]:
    """The main function of a script, by its path in the repository."""

    def main() -> None:
        PROGRAMS[name].start(description)

    return main


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run the main function of a script, and leave with its exit code."""
    sys.exit(run_main(main))


def main() -> None:
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
        near = difflib.get_close_matches(verb, VERBS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(VERBS)}"
        raise UserError(f"sugar has no verb {verb!r}; {advice}")


def _completion(shell: str = "bash") -> str:
    """A script that completes verbs, flags and file names in a shell."""
    from sugar_utils.libraries import load_package

    (shtab,) = load_package("--print_completion", "shtab", "shtab")
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(
            f"no completion for {shell!r}; there is {', '.join(shtab.SUPPORTED_SHELLS)}"
        )
    parser = argparse.ArgumentParser(prog="sugar")
    verbs = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, program in VERBS.items():
        made = program.make_parser(None)
        verbs.add_parser(name, parents=[made], add_help=False, help=program.help)
        for action in made._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def entry() -> int:
    """What the installed command ``sugar`` calls."""
    return run_main(main)
