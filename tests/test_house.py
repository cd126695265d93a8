# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: headers, floors, sizes, requirements, documents."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

from sugar_pipeline.command_line import PROGRAMS, VERBS
from sugar_pipeline.doctor import TESTED_TORCH
from tests.support.flag_tables import flag_rows, parser_for, with_tables
from tests.support.repository import (
    FLOORS,
    ROOT,
    all_files,
    entry_points,
    imported_modules,
    name_of,
    native_files,
    parametrize_files,
    production_files,
    tree_of,
)

RUNNERS = {"sugar_pipeline.command_line", "sugar_utils.entrypoint"}
"""All that a script may import of ours: the table of programs, and what handles errors."""

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 120
DISTRIBUTIONS = {"PIL": "pillow", "warp": "warp-lang"}
"""Distribution of a module where the names differ."""

TRAINING = ROOT / "DOCS" / "TRAINING.md"
SHARED_NAMES = {"__init__.py", "train.py", "metrics.py", "render.py", "view.py"}
"""Entry points are named by the original, or like their siblings there."""

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "DOCS").glob("*.md"))]


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """Parsed files are millions of objects, through which every garbage collection goes."""
    yield
    tree_of.cache_clear()


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


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of every command line in a code block that runs a program."""
    for document in DOCUMENTS:
        blocks = document.read_text(encoding="utf-8").split("```")[1::2]
        for line in "\n".join(blocks).splitlines():
            command = line.split("&&")[-1].strip()
            if re.match(r"(\.venv/bin/)?python [\w/]+\.py ", command):
                words = shlex.split(command)[1:]
                if words[0] in PROGRAMS:
                    yield document.name, words
            elif re.match(r"sugar [a-z]", command):
                verb, *words = shlex.split(command)[1:]
                yield document.name, [VERBS[verb].script, *words]


def test_files_say_their_licence_and_purpose():
    for path in all_files():
        text = path.read_text(encoding="utf-8")
        if text:
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), name_of(path)
            assert ast.get_docstring(tree_of(path)), f"{name_of(path)}: no module docstring"
    for path in native_files():
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n"), name_of(path)


def test_files_and_functions_fit():
    for path in all_files():
        n_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert n_lines <= MAX_FILE_LINES, f"{name_of(path)} has {n_lines} lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                place = f"{name_of(path)}, {node.name}"
                assert length <= MAX_FUNCTION_LINES, f"{place} has {length} lines"


def test_nothing_is_left_to_be_done():
    words = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX"))
    notes = re.compile(rf"\b({words})\b")
    for path in [*all_files(), *native_files()]:
        assert not notes.search(path.read_text(encoding="utf-8")), name_of(path)


def test_imports_point_down():
    for path in production_files():
        if path in entry_points():
            continue
        own = FLOORS.index(path.relative_to(ROOT).parts[0])
        for module in imported_modules(path):
            top = module.split(".")[0]
            imports = f"{name_of(path)} imports {module}"
            assert top not in ("tests", "benchmarks", "train"), imports
            if top in FLOORS:
                assert FLOORS.index(top) <= own, f"{imports} from above"


def test_entry_points_only_parse_and_call():
    for path in entry_points():
        ours = {m for m in imported_modules(path) if m.split(".")[0] in FLOORS}
        assert ours <= RUNNERS, name_of(path)


def test_torch_is_pinned_exactly_and_an_installed_package_takes_what_was_tested():
    assert "torch==2.13.0" in requirement_lines("requirements.txt")
    (low, minor), (high, last) = TESTED_TORCH
    assert requirement_lines("requirements-torch.txt") == [
        f"torch>={low}.{minor},<{high}.{last + 1}"
    ]


def test_the_package_asks_for_what_the_requirements_say():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files = package["tool"]["setuptools"]["dynamic"]["dependencies"]["file"]
    assert files == ["requirements-torch.txt", "requirements-without-torch.txt"]
    extras = package["project"]["optional-dependencies"]
    own, *others = extras.pop("dev")
    assert own == f"sugar-trainer[{','.join(extras)}]"
    listed = [line for extra in extras.values() for line in extra]
    assert sorted([*listed, *others]) == sorted(requirement_lines("requirements-dev.txt")[1:])


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
    foreign = tops - set(sys.stdlib_module_names) - set(FLOORS) - {"tomllib"}
    # Imported by name: through torch.utils.tensorboard, or where it is asked for.
    by_name = {"tensorboard", "open3d", "open3d-cpu", "xatlas"}
    assert {DISTRIBUTIONS.get(top, top) for top in foreign} | by_name == listed


def test_the_tested_range_of_torch_is_the_same_everywhere():
    ends = " to ".join(".".join(map(str, end)) for end in TESTED_TORCH)
    for name in ("README.md", "requirements-without-torch.txt"):
        assert ends in (ROOT / name).read_text(encoding="utf-8")
    pinned = requirement_lines("requirements.txt")[0].removeprefix("torch==").split(".")
    assert TESTED_TORCH[0] <= tuple(map(int, pinned[:2])) <= TESTED_TORCH[1]


def test_readme_commands_do_all_the_setting_up_in_one_line():
    demo, tests = command_after("<!-- demo command -->"), command_after("<!-- test command -->")
    assert demo == (
        "python -m venv .venv && .venv/bin/pip install -r requirements.txt"
        " && .venv/bin/python train.py --demo"
    )
    assert tests == (
        "python -m venv .venv && .venv/bin/pip install -q -r requirements-dev.txt"
        ' && .venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"'
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


def test_the_tables_of_flags_are_current():
    text = TRAINING.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tests.support.flag_tables"


@pytest.mark.parametrize("entry", PROGRAMS)
def test_every_flag_of_an_entry_point_is_in_a_table(entry):
    parser, lines = parser_for(entry), set(TRAINING.read_text(encoding="utf-8").splitlines())
    headings = [group.title for group in parser._action_groups if group.title != "options"]
    for heading in headings:
        missing = [row for row in flag_rows(parser, heading) if row not in lines]
        assert not missing, f"{heading}: {missing}"


def test_the_documents_name_all_floors_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    floors = " < ".join(f"`{floor}`" for floor in FLOORS)
    assert f"{floors} < entry points" in " ".join(text.split())


def test_every_folder_of_the_product_is_in_the_architecture():
    text = (ROOT / "DOCS" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in [*production_files(), *native_files()]:
        assert path.parent == ROOT or f"`{name_of(path.parent)}/`" in text, name_of(path)


@parametrize_files(DOCUMENTS)
def test_files_that_documents_name_exist(path):
    names = {file.name for file in [*all_files(), *native_files()]}
    for file in re.findall(r"`([\w./-]+\.(?:py|inc|sh))`", path.read_text(encoding="utf-8")):
        exists = (ROOT / file).is_file() if "/" in file else file in names
        assert exists, f"{file} does not exist"


def test_no_two_files_share_a_name():
    seen: dict[str, str] = {}
    for path in production_files():
        if path.name not in SHARED_NAMES:
            assert path.name not in seen, f"{name_of(path)} and {seen[path.name]}"
            seen[path.name] = name_of(path)


def test_commands_in_the_documents_have_flags_that_exist():
    commands = list(documented_commands())
    assert len(commands) > 5
    for document, (entry, *words) in commands:
        _, unknown = parser_for(entry).parse_known_args(words)
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
