# SPDX-License-Identifier: Apache-2.0
"""The command ``sugar``: its verbs, its completion, and the package that brings it."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_pipeline import command_line
from sugar_pipeline.command_line import PROGRAMS, VERBS, main
from sugar_utils import __version__
from sugar_utils.command_text import SCRIPTS, command_text
from tests.support.repository import (
    FLOORS,
    ROOT,
    entry_points,
    name_of,
    native_files,
    production_files,
)
from tests.support.tiny_scene import refusal, run_cli

# What ``sugar --help`` must not wait for.
HEAVY = ("torch", "warp", "numpy", "pycolmap", "rich", "viser", "msgspec")


def test_no_garbage_is_collected_while_torch_is_loaded(monkeypatch):
    collected = []

    def load(place: str) -> type:
        collected.append(gc.isenabled())
        return VanillaOptions

    monkeypatch.setattr(command_line, "_named", load)
    PROGRAMS["gaussian_splatting/train.py"].make_parser(None)
    assert collected == [False]
    assert gc.isenabled()


def test_every_script_is_in_the_table_of_programs():
    assert {name_of(path) for path in entry_points()} == set(PROGRAMS) - set(VERBS)


def test_help_lists_the_verbs_and_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['sugar', '--help']; from sugar_pipeline.command_line import main\n"
        f"main(); print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "[]\n"
    wanted = "demo run train convert mesh refine texture view render export metrics doctor"
    assert set(wanted.split()) <= set(VERBS)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed[:-1] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_flags_of_its_script_and_names_itself(verb, capsys):
    assert run_cli(main, verb, "--help_all") == 0
    text = capsys.readouterr().out
    assert f"usage: sugar {verb} " in text
    assert f"python {verb}.py" not in text


def test_bad_verbs_and_flags_are_one_line(capsys):
    cases = {
        ("rn",): "sugar has no verb 'rn'; did you mean run?",
        ("zzz",): "choose one of demo, run",
        ("mesh", "--levl", "3"): "unknown flag --levl",
        ("export",): "result",
        ("--print_completion", "ksh"): "no completion for 'ksh'; there is bash",
    }
    for words, message in cases.items():
        error = refusal(capsys, main, *words)
        assert message in error
    assert run_cli(main, "--version") == 0
    assert capsys.readouterr().out == f"sugar {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_knows_verbs_and_flags(shell, capsys):
    pytest.importorskip("shtab")
    assert run_cli(main, "--print_completion", shell) == 0
    text = capsys.readouterr().out
    for word in (*VERBS, "mesh_extractor", "vanilla_iterations", "max_triangles"):
        assert word in text


def run_in(folder: Path, *command: object) -> subprocess.CompletedProcess:
    """Run without what this repository's folder or the environment would add to the modules."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=clean, capture_output=True, text=True, timeout=1200
    )


SMALL_DEMO = """
import functools, sys
from sugar_pipeline import command_line
from sugar_pipeline.demo import demo_scene

make = demo_scene.make_demo_scene
demo_scene.make_demo_scene = functools.partial(make, n_views=10, width=64, height=48)
demo_scene.VANILLA_ITERATIONS = 100
demo_scene.FLAGS = demo_scene.FLAGS.replace("0.025", "0.004")
sys.argv = ["sugar", "demo", "--stop_after", "mesh", "--force", "True"]
sys.exit(command_line.entry())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    done = run_in(folder, sys.executable, "-m", "build", "--outdir", folder, ROOT)
    if "ConnectionError" in done.stdout or "No matching distribution" in done.stdout:
        pytest.skip("the build backend cannot be downloaded")
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / f"sugar_trainer-{__version__}.tar.gz").is_file()
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_all_code_and_data_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    inside = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    web = [path for path in (ROOT / "sugar_utils" / "web").iterdir() if path.is_file()]
    typed = [ROOT / floor / "py.typed" for floor in FLOORS]
    assert names == {name_of(path) for path in [*inside, *native_files(), *web, *typed]}
    assert wheel.stat().st_size < 2 << 20


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_in_another_folder(wheel, tmp_path):
    """Only the package is new in the environment; all libraries are those of the tests."""
    environment = tmp_path / "environment"
    venv = run_in(tmp_path, sys.executable, "-m", "venv", "--without-pip", environment)
    assert venv.returncode == 0
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    libraries = [path for path in sys.path if path.endswith("-packages")]
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run_in(tmp_path, programs / "python", "-c", probe).stdout.strip())
    (own / "libraries.pth").write_text("\n".join(libraries))
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    done = run_in(tmp_path, *pip, "install", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr[-2000:]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run_in(elsewhere, programs / "python", "-c", "import sugar_pipeline as s; print(s)")
    assert str(own) in where.stdout
    done = run_in(elsewhere, programs / "python", "-c", SMALL_DEMO)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "coarse mesh against the known geometry" in done.stdout
    assert list(elsewhere.glob("output/coarse_mesh/*/*.ply"))
    done = run_in(elsewhere, programs / "sugar", "doctor", "--device", "cpu")
    assert "no problems" in done.stdout


@pytest.mark.parametrize(
    ("program", "has_scripts", "verb", "expected"),
    [
        ("/usr/bin/sugar", True, "mesh", "sugar mesh 'my scan'"),
        ("sugar.exe", False, "mesh", "sugar mesh 'my scan'"),
        ("train.py", True, "mesh", "python extract_mesh.py 'my scan'"),
        ("train.py", True, "view", "python -m sugar_pipeline view 'my scan'"),
        ("notebook.py", False, "view", "sugar view 'my scan'"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="quotes of another shell")
def test_commands_are_worded_as_their_reader_starts_them(
    program, has_scripts, verb, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [program, "-s", "scan"])
    if has_scripts:
        (tmp_path / "train.py").touch()
    assert command_text(verb, Path("my scan"), root=tmp_path) == expected


def test_a_verb_advises_its_script_where_it_has_one():
    assert set(SCRIPTS) == {verb for verb, program in VERBS.items() if program.script}
    for verb, command in SCRIPTS.items():
        script, *flags = command.split()
        assert script == VERBS[verb].script
        assert flags == [f"--{name}" for name in VERBS[verb].chosen]
        assert (ROOT / script).is_file()


def test_messages_name_commands_through_one_function():
    """A message that advises a script is of no use to those who installed the package."""
    advice = re.compile(r'(?<!")"(?!"")[^"]*\bpython [\w/]+\.py')
    lines = []
    for path in production_files():
        # Examples in the help of a verb are turned into its own.
        if path.name != "pipeline_flags.py" and path not in entry_points():
            text = path.read_text(encoding="utf-8")
            lines += [line for line in text.splitlines() if advice.search(line)]
    assert lines == []
