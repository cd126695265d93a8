# SPDX-License-Identifier: Apache-2.0
"""The program as functions: examples of the docstrings run, errors are exceptions."""

from __future__ import annotations

import doctest
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sugar_pipeline
from sugar_pipeline import api
from sugar_utils.errors import UserError
from tests.support.repository import ROOT, tree_of
from tests.support.tiny_scene import make_tiny_checkpoint, make_tiny_scene

IN_ORDER = [
    node.name
    for node in tree_of(ROOT / "sugar_pipeline" / "api.py").body
    if getattr(node, "name", "_")[0] != "_"
]
"""Examples use what those before them made."""

pytestmark = pytest.mark.usefixtures("small_pictures")


def by_script(name: str) -> dict:
    """Flags of a function that make its example small."""
    sizes = {
        "sdf_samples": 300,
        "surface_points": 4000,
        "square_size": 6,
        "schedule_scale": 0.002,
        "poisson_depth": 5,
        "background_mesh": False,
        "meshing_backend": "pycolmap",
        "force": True,
        "decimation_targets": 300,
        "regularization_type": "dn_consistency",
        "refinement_iterations": 3000,
    }
    known = {
        "run": tuple(name for name in sizes if name != "decimation_targets"),
        "train_coarse": ("sdf_samples",),
        "extract_mesh": ("surface_points", "decimation_targets", "meshing_backend"),
        "refine": (),
        "bake_texture": ("square_size",),
    }
    return {flag: sizes[flag] for flag in known.get(name, ())} | {"progress": lambda *step: None}


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Iterator[dict]:
    """Names of the examples; their folder has the scene and the checkpoint that they name."""
    root, before = tmp_path_factory.mktemp("api"), Path.cwd()
    make_tiny_checkpoint(root / "gaussians", make_tiny_scene(root / "scan"))
    os.chdir(root)
    yield {name: getattr(sugar_pipeline, name) for name in sugar_pipeline.__all__}
    os.chdir(before)


def test_the_functions_of_the_package_are_those_of_the_module():
    assert sorted(IN_ORDER) == sorted(sugar_pipeline.__all__)
    assert sugar_pipeline.run is api.run
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sugar_pipeline.nothing


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "run")) for n in IN_ORDER]
)
def test_the_example_of_a_function_runs(name, names):
    function = names[name]
    assert "return" in function.__annotations__
    names["small"] = by_script(name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs=names)
    assert test.examples
    said: list[str] = []
    # A copy of the names is cleared afterwards, and the next example goes on with ours.
    doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    assert not said, "".join(said)


def test_what_is_wrong_is_an_exception_and_not_an_exit(names, tmp_path):
    cases = [
        (lambda: api.run(tmp_path / "none"), "no such scene folder"),
        (
            lambda: api.run("scan", low_polly=True),
            "unknown setting low_polly; did you mean low_poly",
        ),
        (lambda: api.run("scan", refinement_iterations="x"), "'x' is not a whole number"),
        (lambda: api.run("scan", bboxmin=(0, 0)), "is not three numbers"),
        (lambda: api.train_coarse("scan", tmp_path), "point_cloud"),
        (lambda: api.load_gaussians(tmp_path / "a.spz"), "a.spz"),
        (lambda: api.load_scene(tmp_path), "no scene found"),
    ]
    for call, message in cases:
        with pytest.raises(UserError, match=message):
            call()


def test_progress_is_called_and_nothing_is_printed(names, tmp_path, capsys):
    steps: list[tuple[str, int, int]] = []
    api.train_vanilla(
        "scan", tmp_path / "out", iterations=5, progress=lambda *step: steps.append(step)
    )
    assert [step for step in steps if step[2] == 5] == [("vanilla", n, 5) for n in range(1, 6)]
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out" / "checkpoints" / "log.txt").is_file()
    assert "iterations = 5\n" in (tmp_path / "out" / "checkpoints" / "settings.toml").read_text()


@pytest.mark.slow
def test_the_notebook_runs(names, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    flags = {k: v for k, v in by_script("run").items() if k != "progress"}
    flags |= {"gs_output_dir": str(Path("gaussians").resolve()), "low_poly": True}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells[0].source = f"scene, flags = {str(Path('scan').resolve())!r}, {flags!r}"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
    shown = [out["data"] for cell in cells for out in cell.outputs if "data" in out]
    assert sum("image/png" in data for data in shown) == 2
    assert any("iframe" in data.get("text/html", "") for data in shown)
    assert "'vanilla', 20, 20" in shown[-1]["text/plain"]
