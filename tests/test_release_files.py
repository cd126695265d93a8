# SPDX-License-Identifier: Apache-2.0
"""Containers, pages, workflow, templates and citation are what their formats ask for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sugar_utils import __version__
from tests.support.repository import ROOT, parametrize_files

DOCKERFILES = [ROOT / "Dockerfile", ROOT / "Dockerfile.cuda"]
SCHEMAS = {
    ".github/workflows/ci.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/bug_report.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature_request.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}
KNOWN = "FROM RUN ARG ENV WORKDIR COPY USER VOLUME ENTRYPOINT CMD"


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, rest) of every instruction, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@parametrize_files(DOCKERFILES)
def test_a_dockerfile_follows_the_usual_rules(path):
    found = instructions(path)
    names = [name for name, _ in found]
    assert set(names) <= set(KNOWN.split())
    assert names[0] == "FROM"
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", found[0][1]), "a fixed base image"
    assert names[-2:] == ["ENTRYPOINT", "CMD"]
    values = dict(found)
    assert values["ENTRYPOINT"] == '["sugar"]'
    assert values["CMD"].startswith('["')
    assert values["USER"] not in ("root", "0")
    assert "RUN" not in names[names.index("USER") :]
    assert values["VOLUME"] == values["WORKDIR"] == "/scenes"
    for name, rest in found:
        if name == "WORKDIR":
            assert rest.startswith("/")
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert rest.startswith("apt-get update &&")
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
        assert "sudo" not in rest
        assert "://" not in rest, "no hosts"


@parametrize_files(DOCKERFILES)
def test_what_a_dockerfile_copies_and_installs_exists(path):
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in kept if line.startswith("!")]
    for name, rest in instructions(path):
        if name == "COPY" and rest != ". .":
            for file in shlex.split(rest)[:-1]:
                assert (ROOT / file).is_file()
                assert any(Path(file).match(pattern) for pattern in allowed), file
    extras = re.search(r'"\.\[(.*)\]"', path.read_text())[1].split(",")
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in declared for extra in extras)
    for pattern in allowed:
        assert list(ROOT.glob(pattern)), pattern


@pytest.mark.parametrize("file", SCHEMAS)
def test_files_for_hosts_of_repositories_have_their_schemas(file):
    checker = pytest.importorskip("check_jsonschema")
    words = ["--builtin-schema", f"vendor.{SCHEMAS[file]}", str(ROOT / file)]
    done = pytest.importorskip("click.testing").CliRunner().invoke(checker.main, words)
    assert done.exit_code == 0, done.output


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "__version__" in (ROOT / "pyproject.toml").read_text()


def test_the_workflow_runs_what_the_readme_says_on_all_systems():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for word in ("ubuntu-latest", "windows-latest", "macos-latest"):
        assert word in text
    assert all(f'"3.{minor}"' in text for minor in range(10, 15))
    assert '-m pytest -n 2 --dist loadfile -m "not slow"' in text


def test_the_bug_report_asks_for_the_output_of_the_doctor():
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
    assert "sugar doctor" in text
    assert "python train.py --doctor" in text


@pytest.mark.slow
def test_the_pages_are_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WARNING -" not in done.stderr
    page = (tmp_path / "API" / "index.html").read_text(encoding="utf-8")
    for name in ("run", "train_vanilla", "extract_mesh", "render"):
        assert f'id="sugar_pipeline.api.{name}"' in page
