# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: headers, floors, sizes, requirements, documents."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaussian_splatting.train import parser as vanilla_parser
from sugar_extractors.mesh.mesh_options import mesh_parser
from sugar_extractors.texture.texture_options import texture_parser
from sugar_pipeline.doctor.machine_checkup import TESTED_TORCH
from sugar_pipeline.metrics_options import metrics_parser
from sugar_pipeline.pipeline_flags import STAGES, full_parser, train_parser
from sugar_trainers.coarse_options import coarse_parser
from sugar_trainers.refine_options import refine_parser

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (
    "sugar_utils",
    "gaussian_splatting",
    "sugar_scene",
    "sugar_trainers",
    "sugar_extractors",
    "sugar_pipeline",
)
"""From the ground up; a file imports from its own floor and from those below."""

RUNNERS = {
    "gaussian_splatting.vanilla.vanilla_options",
    "gaussian_splatting.vanilla.vanilla_run",
    "sugar_extractors.quality.mesh_report",
    "sugar_extractors.mesh.mesh_options",
    "sugar_extractors.texture.texture_options",
    "sugar_pipeline.commands",
    "sugar_pipeline.pipeline_flags",
    "sugar_pipeline.model_metrics",
    "sugar_pipeline.metrics_options",
    "sugar_trainers.coarse_run",
    "sugar_trainers.coarse_options",
    "sugar_trainers.refine_options",
    "sugar_trainers.refine_run",
    "sugar_utils.flags",
    "sugar_utils.frame",
}
"""All that an entry point may import of ours: parsers and runners."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 100
DISTRIBUTIONS = {"PIL": "pillow", "warp": "warp-lang"}
"""Distribution of a module where the names differ."""

INPUT = ("Input", "Checkpoint", "Background", "Device")
PIPELINE = (
    *("Input", "Background", "Device", "Backends", "Coarse stage", "Memory", "Run"),
    *("Pipeline", "Presets"),
    *("Mesh stage", "Surface", "Refinement stage", "Texture"),
)
COARSE = (*INPUT, "Backends", "Coarse stage", "Memory", "Run", "Single coarse stage")
PARSERS = {
    "train.py": (lambda: train_parser(None), (*PIPELINE, "Checkpoint", "Only train.py")),
    "train_full_pipeline.py": (
        lambda: full_parser(None),
        (*PIPELINE, "Only train_full_pipeline.py"),
    ),
    "train_coarse_density.py": (lambda: coarse_parser(None), COARSE),
    "train_coarse_sdf.py": (lambda: coarse_parser(None), COARSE),
    "train_refined.py": (
        lambda: refine_parser(None),
        (*INPUT, "Backends", "Memory", "Run", "Only train_refined.py"),
    ),
    "extract_mesh.py": (
        lambda: mesh_parser(None),
        ("Input", "Checkpoint", "Device", "Surface", "Only extract_mesh.py"),
    ),
    "extract_refined_mesh_with_texture.py": (
        lambda: texture_parser(None),
        (
            *("Input", "Checkpoint", "Background", "Texture"),
            "Only extract_refined_mesh_with_texture.py",
        ),
    ),
    "metrics.py": (lambda: metrics_parser(None), ("Metrics", "Presets", "Device")),
    "gaussian_splatting/train.py": (
        vanilla_parser,
        ("Device", "Backends", "Memory", "Run", "Vanilla trainer"),
    ),
}
"""Parser of each entry point, and the sections of DOCS/TRAINING.md that list its flags."""

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "DOCS").glob("*.md"))]


def entry_points() -> list[Path]:
    return [*sorted(ROOT.glob("*.py")), ROOT / "gaussian_splatting" / "train.py"]


def production_files() -> list[Path]:
    inside = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return [*inside, *sorted(ROOT.glob("*.py"))]


def all_files() -> list[Path]:
    beside = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    return [*production_files(), *sorted(beside)]


def native_files() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.inc"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parametrize_files(files: list[Path]):
    return pytest.mark.parametrize("path", files, ids=name_of)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import in line {node.lineno}"
            yield node.module or ""


def requirement_lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def packages_of(name: str) -> set[str]:
    """Packages of a requirements file and of those it includes."""
    found: set[str] = set()
    for line in requirement_lines(name):
        included = line.removeprefix("-r ")
        found |= {re.split(r"[=~]=", line)[0]} if included == line else packages_of(included)
    return found


def command_after(marker: str) -> str:
    """The one command in the code block after a marker of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split(marker, 1)[1].split("```", 2)[1]
    (command,) = block.splitlines()[1:]
    return command


def flag_tables() -> dict[str, dict[tuple[str, ...], str]]:
    """Section of DOCS/TRAINING.md to spellings of a flag to its default."""
    tables: dict[str, dict[tuple[str, ...], str]] = {}
    section, in_table = "", False
    for line in (ROOT / "DOCS" / "TRAINING.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        in_table = line.startswith("|") and (in_table or line.startswith("| flag | default |"))
        if in_table and line.startswith("| `-"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            tables.setdefault(section, {})[tuple(re.findall(r"`(-[^`]*)`", cells[0]))] = cells[1]
    return tables


def default_text(action: argparse.Action) -> str:
    """The default as the tables spell it."""
    if action.required:
        return "required"
    if action.nargs == 0:
        return "off"
    if action.default is None:
        return "unset"
    if isinstance(action.default, list):
        return " ".join(map(str, action.default)) or "none"
    return str(action.default)


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every command line in a code block that runs an entry point."""
    for document in DOCUMENTS:
        blocks = document.read_text(encoding="utf-8").split("```")[1::2]
        for line in "\n".join(blocks).splitlines():
            command = line.split("&&")[-1].strip()
            if re.match(r"(\.venv/bin/)?python [\w/]+\.py ", command):
                words = shlex.split(command)[1:]
                if words[0] in PARSERS:
                    yield document.name, words


@parametrize_files(all_files())
def test_file_says_its_licence_and_purpose(path):
    text = path.read_text(encoding="utf-8")
    if not text:
        return
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", native_files(), ids=name_of)
def test_native_file_says_its_licence(path):
    assert path.read_text(encoding="utf-8").startswith("// SPDX-License-Identifier: Apache-2.0\n")


@parametrize_files(all_files())
def test_file_and_functions_fit(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@parametrize_files([*all_files(), *native_files()])
def test_nothing_is_left_to_be_done(path):
    notes = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error"))
    assert not re.search(rf"\b({notes})\b", path.read_text(encoding="utf-8"))


@parametrize_files([p for p in production_files() if p.parent != ROOT])
def test_imports_point_down(path):
    own = FLOORS.index(path.relative_to(ROOT).parts[0])
    for module in imported_modules(path):
        top = module.split(".")[0]
        assert top not in ("tests", "benchmarks", "train"), f"imports {module}"
        if top in FLOORS:
            assert FLOORS.index(top) <= own, f"imports {module} from above"


@parametrize_files(entry_points())
def test_entry_point_only_parses_and_calls(path):
    ours = {m for m in imported_modules(path) if m.split(".")[0] in FLOORS}
    assert ours <= RUNNERS


def test_torch_is_pinned_exactly():
    assert "torch==2.13.0" in requirement_lines("requirements.txt")


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-without-torch.txt", "requirements-dev.txt"]
)
def test_requirements_are_pinned_and_explained(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    for before, line in zip([""] + lines, lines, strict=False):
        assert "://" not in line, "no hosts in requirements"
        assert "--" not in line, "no options in requirements"
        if line.startswith(("#", "-r ")) or not line:
            continue
        assert re.match(r"[a-z][a-z0-9-]*(==|~=)\d", line), f"{line}: not pinned"
        same_package = before.split("~=")[0] == line.split("~=")[0]
        assert before.startswith("#") or same_package, f"{line}: says not what it is for"


def test_requirements_include_each_other():
    assert requirement_lines("requirements-dev.txt")[0] == "-r requirements.txt"
    assert packages_of("requirements.txt") - packages_of("requirements-without-torch.txt") == {
        "torch"
    }


def test_requirements_are_what_the_code_imports():
    listed = packages_of("requirements.txt")
    tops = {m.split(".")[0] for path in production_files() for m in imported_modules(path)}
    foreign = tops - set(sys.stdlib_module_names) - set(FLOORS)
    # Imported by name: one through torch.utils.tensorboard, one where its system libraries are.
    by_name = {"tensorboard", "open3d", "open3d-cpu"}
    assert {DISTRIBUTIONS.get(top, top) for top in foreign} | by_name == listed


def test_the_tested_range_of_torch_is_the_same_everywhere():
    ends = " to ".join(".".join(map(str, end)) for end in TESTED_TORCH)
    for name in ("README.md", "requirements-without-torch.txt"):
        assert ends in (ROOT / name).read_text(encoding="utf-8")
    pinned = requirement_lines("requirements.txt")[0].removeprefix("torch==").split(".")
    assert TESTED_TORCH[0] <= tuple(map(int, pinned[:2])) <= TESTED_TORCH[1]


def test_readme_commands_do_all_the_setting_up_in_one_line():
    demo, tests = command_after("results\nare:"), command_after("<!-- test command -->")
    assert demo == (
        "python -m venv .venv && .venv/bin/pip install -r requirements.txt"
        " && .venv/bin/python train.py --demo"
    )
    assert tests == (
        "python -m venv .venv && .venv/bin/pip install -q -r requirements-dev.txt"
        ' && .venv/bin/python -m pytest -m "not slow"'
    )


def test_ci_runs_the_readme_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    marker, pattern = re.search(
        r"sed -n '/(.*?)/,/\^\$/p' README.md \| grep '(.*?)'", script
    ).groups()
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first = lines.index(marker)
    found = [x for x in lines[first : lines.index("", first)] if re.match(pattern, x)]
    assert found == [command_after(marker)]
    assert 'eval "$test_command"' in script


@pytest.mark.parametrize("entry", PARSERS)
def test_every_flag_is_documented_with_its_default(entry):
    make_parser, sections = PARSERS[entry]
    tables = flag_tables()
    documented = {flag: text for section in sections for flag, text in tables[section].items()}
    actual = {
        tuple(action.option_strings): default_text(action)
        for action in make_parser()._actions
        if action.dest != "help"
    }
    assert documented == actual


def test_the_documents_name_all_floors_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    floors = " < ".join(f"`{floor}`" for floor in FLOORS)
    assert f"{floors} < entry points" in " ".join(text.split())


def test_flags_with_choices_are_documented_with_all_of_them():
    lines = (ROOT / "DOCS" / "TRAINING.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith("| `--stop_after`")]
    assert all(f"`{stage}`" in row for stage in STAGES)


def test_no_section_lists_flags_of_nobody():
    known = {section for _, sections in PARSERS.values() for section in sections}
    assert set(flag_tables()) == known


def test_commands_in_the_documents_have_flags_that_exist():
    commands = list(documented_commands())
    assert len(commands) > 5
    for document, (entry, *words) in commands:
        _, unknown = PARSERS[entry][0]().parse_known_args(words)
        assert not unknown, f"{document}: {entry} {' '.join(words)}"


@parametrize_files(DOCUMENTS)
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = path.parent / file if file else path
        assert other.is_file(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{target}: no such heading"
