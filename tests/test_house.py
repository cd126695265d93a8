# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: headers, imports, requirements, documents."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

from sugar_pipeline import doctor
from sugar_pipeline.command_line import PROGRAMS, VERBS
from sugar_utils.libraries import EXTRAS
from tests.support.flag_tables import parser_for, with_tables
from tests.support.repository import (
    FLOORS,
    FOLDERS,
    KNOWN_UPWARD_IMPORTS,
    ROOT,
    all_files,
    entry_points,
    folder_of,
    imported_modules,
    module_file,
    modules_imported_at_run_time,
    name_of,
    native_files,
    parametrize_files,
    production_files,
    tree_of,
)

RUNNERS = {"sugar_pipeline.command_line", "sugar_utils.entrypoint"}
"""All that a script may import of ours: the table of programs, and what handles errors."""

DISTRIBUTIONS = {"PIL": "pillow", "warp": "warp-lang"}
"""Distribution of a module where the names differ."""

BESIDE_THE_PIPELINE = {
    "sugar_maps": ("sugar_extractors/export/export_", "sugar_viewer/"),
    "sugar_pipeline/blocks": (),
    "sugar_viewer": (),
}
"""Packages that a run does without, and who imports them: export, orthophotos."""

FLAG_TABLES = ROOT / "DOCS" / "FLAGS.md"
PAGES = sorted((ROOT / "DOCS").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LOG = ROOT / "benchmarks" / "LOG.md"
"""Measurements with the commands of their time: scripts in it may be gone."""
MOST_CHARACTERS = 120  # of a line of a page; rows of tables and code cannot be broken


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
            elif re.match(r"(\.venv/bin/)?sugar [a-z]", command):
                verb, *words = shlex.split(command)[1:]
                yield document.name, [VERBS[verb].script or verb, *words]


def test_files_say_their_licence_and_purpose():
    for path in all_files():
        text = path.read_text(encoding="utf-8")
        if text:
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), name_of(path)
            _, _, rest = text.partition("\n")
            begin = re.match(r'(# ruff: .*\n)?"""[\w`]', rest)
            assert begin is not None, f"{name_of(path)}: no module docstring"
    for path in native_files():
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n"), name_of(path)


def imports_from_above() -> Iterator[tuple[str, str, str]]:
    """(folder, folder above it, import) of the product's imports that do not point down."""
    order = {folder: number for number, folder in enumerate(FOLDERS)}
    for path in production_files():
        if path in entry_points():
            continue
        folder = folder_of(path)
        for module in imported_modules(path):
            target = module_file(module)
            if target is None or module.split(".")[0] not in FLOORS:
                continue
            other = folder_of(target)
            if order[other] > order[folder]:
                yield folder, other, f"{name_of(path)} imports {module}"


def test_imports_point_down():
    upward = {}
    for folder, other, line in imports_from_above():
        upward.setdefault((folder, other), line)
    unknown = {pair: line for pair, line in upward.items() if pair not in KNOWN_UPWARD_IMPORTS}
    assert not unknown
    assert set(upward) == KNOWN_UPWARD_IMPORTS, "take the pairs that are gone off the list"


def test_the_product_imports_neither_tests_nor_scripts():
    for path in production_files():
        tops = {module.split(".")[0] for module in imported_modules(path)}
        assert not tops & {"tests", "benchmarks", "train"}, name_of(path)


def test_the_pipeline_does_without_maps_blocks_and_viewer():
    """Its own programs import each of them; all others load it where they can do without."""
    for extra, users in BESIDE_THE_PIPELINE.items():
        for path in production_files():
            name = name_of(path)
            if not name.startswith((f"{extra}/", *users)):
                modules = [module.replace(".", "/") for module in imported_modules(path)]
                assert not any(module.startswith(extra) for module in modules), name


def test_folders_are_small_and_in_the_order():
    files = [path for path in production_files() if path not in entry_points()]
    folders = [folder_of(path) for path in files if path.name != "__init__.py"]
    assert set(folders) <= set(FOLDERS)
    assert len(FLOORS) <= 9
    for folder in set(folders):
        assert folders.count(folder) <= 20, folder


def test_entry_points_only_parse_and_call():
    for path in entry_points():
        ours = {m for m in imported_modules(path) if m.split(".")[0] in FLOORS}
        assert ours <= RUNNERS, name_of(path)


def test_the_package_asks_for_what_the_requirements_say():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files = package["tool"]["setuptools"]["dynamic"]["dependencies"]["file"]
    assert files == ["requirements-torch.txt", "requirements-without-torch.txt"]
    extras = package["project"]["optional-dependencies"]
    own, *others = extras.pop("dev")
    assert own == f"sugar-trainer[{','.join(extras)}]"
    # Extras may need the same library.
    listed = {line for extra in extras.values() for line in extra}
    assert sorted([*listed, *others]) == sorted(requirement_lines("requirements-dev.txt")[1:])


def test_optional_packages_are_installed_by_the_extra_that_has_them():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = package["project"]["optional-dependencies"]
    for name, extra in EXTRAS.items():
        assert any(re.match(rf"{re.escape(name)}[~><=]", line) for line in extras[extra]), name


def test_requirements_include_each_other():
    assert requirement_lines("requirements-dev.txt")[0] == "-r requirements.txt"
    assert packages_of("requirements.txt") - packages_of("requirements-without-torch.txt") == {
        "torch"
    }


def test_requirements_are_what_the_code_imports():
    listed = packages_of("requirements.txt")
    tops = {
        module.split(".")[0]
        for path in production_files()
        for module in modules_imported_at_run_time(path)
    }
    foreign = tops - set(sys.stdlib_module_names) - set(FLOORS) - {"tomllib"}
    # Imported by name: through torch.utils.tensorboard, or where it is asked for.
    by_name = {"tensorboard", "open3d", "open3d-cpu", "viser", "xatlas"}
    assert {DISTRIBUTIONS.get(top, top) for top in foreign} | by_name == listed


def test_the_doctor_looks_for_what_the_requirements_say():
    """Findings about Warp and Open3D are lines of their own; Python brings what tomli reads."""
    listed = packages_of("requirements-without-torch.txt")
    elsewhere = {"warp-lang", "open3d", "open3d-cpu", "tomli"}
    assert {*doctor.REQUIRED, *doctor.OPTIONAL} - {"lpips"} == listed - elsewhere


def test_the_tables_of_flags_are_current():
    text = FLAG_TABLES.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tests.support.flag_tables"


@parametrize_files(DOCUMENTS)
def test_files_that_documents_name_exist(path):
    names = {file.name for file in [*all_files(), *native_files()]}
    for file in re.findall(r"`([\w./-]+\.(?:py|inc|sh))`", path.read_text(encoding="utf-8")):
        exists = (ROOT / file).is_file() if "/" in file else file in names
        assert exists, f"{file} does not exist"


def test_commands_in_the_documents_have_flags_that_exist():
    commands = list(documented_commands())
    assert len(commands) > 5
    for document, (entry, *words) in commands:
        _, unknown = parser_for(entry).parse_known_args(words)
        assert not unknown, f"{document}: {entry} {' '.join(words)}"


def test_every_page_is_linked_from_the_readme_and_the_start_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    more = readme.split("\n## More\n")[1]
    start = (ROOT / "DOCS" / "index.md").read_text(encoding="utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        if page.name != "index.md":
            assert f"](DOCS/{page.name})" in more, page.name
            assert f"]({page.name})" in start, page.name
            assert f": {page.name}\n" in navigation, page.name
    assert len(readme.encode()) <= 9_000


@parametrize_files([*PAGES, LOG])
def test_lines_of_pages_fit(path):
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.lstrip().startswith("|"):
            assert len(line) <= MOST_CHARACTERS, f"{path.name}:{number}"


@parametrize_files([*DOCUMENTS, ROOT / "CHANGELOG.md", LOG])
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\[[^\]]*\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = path.parent / file if file else path
        assert other.is_file(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{target}: no such heading"
