# SPDX-License-Identifier: Apache-2.0
"""The page of a scan holds all that it shows, and a browser without a network draws it."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trimesh
from PIL import Image

from gaussian_splatting.core.moved import GLB_AXES, moved_cloud
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.export.engines import web_page
from sugar_extractors.export.engines.scan_program import scan_program
from sugar_extractors.export.engines.web_page import read_page_gaussians
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.outputs.result_page import write_index
from sugar_extractors.placing import PlacementOptions
from sugar_utils.html import MESH_ELEMENT, Page, element_bytes
from tests.support.repository import ROOT
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export
from tests.test_export_placement import inputs

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

__all__ = ["inputs"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WEB = ROOT / "sugar_utils" / "web"


@pytest.fixture(scope="module")
def page(inputs, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("page") / "a & b.html"
    words = ("--to", "html", "--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, inputs.obj, *words) == 0
    return target


def test_the_page_holds_mesh_and_gaussians_in_one_world(page, inputs):
    glb = element_bytes(page.read_text(encoding="utf-8"), MESH_ELEMENT)
    (mesh,) = trimesh.load_scene(io.BytesIO(glb), file_type="glb").geometry.values()
    vertices = inputs.mesh.vertices.double().numpy() @ GLB_AXES[:3, :3].T
    np.testing.assert_allclose(mesh.bounds, [vertices.min(axis=0), vertices.max(axis=0)], atol=1e-6)
    expected = moved_cloud(inputs.cloud, GLB_AXES)
    assert fidelity(expected, read_page_gaussians(page, lambda _: None)).position < 1e-3


def test_the_page_names_no_other_file_and_escapes_its_title(page):
    text = page.read_text(encoding="utf-8")
    assert "<title>a &amp; b</title>" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?:|src=|href=|@import|url\(", markup)
    assert text.count("<script") == 3


def test_the_bundle_is_that_of_its_source_with_the_licences_of_its_parts():
    bundle = scan_program()
    source = (WEB / "source" / "scan-page.js").read_text(encoding="utf-8")
    versions = json.loads((WEB / "source" / "package.json").read_text())["dependencies"]
    licence = source[source.index("/*!") : source.index("*/")]
    assert licence in bundle
    for name, package in (("Spark", "@sparkjsdev/spark"), ("three.js", "three")):
        assert f"{name} {versions[package]}" in licence
    message = re.search(r"`(This browser[^$]*)", source)
    assert message is not None
    assert message[1] in bundle
    assert "</script" not in bundle.lower()


def test_a_page_that_browsers_do_not_open_is_refused(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(web_page, "_LARGEST", 1000)
    words = ("--to", "html", "--gaussians", inputs.ply, "-o", tmp_path / "a")
    error = refusal(capsys, export.main, inputs.obj, *words)
    assert "a.html" in error
    assert "more than browsers open" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("orient", ["up", "none"])
def test_the_folder_of_results_gets_a_page_that_is_upright_like_its_glb(orient, inputs, tmp_path):
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    made = FinalResults(inputs.obj, inputs.ply, lambda: read_gaussian_ply(inputs.ply))
    placement = PlacementOptions(orient=orient, scale_factor=2.0)
    write_result_folder(tmp_path, made, scene, placement)
    words = {"upright": orient == "up", "lit": False, "notify": pytest.fail}
    page = write_index(tmp_path, **words)
    assert page == tmp_path / "index.html"
    text = page.read_text(encoding="utf-8")
    assert f"<h1>{tmp_path.name}</h1>" in text
    glb = io.BytesIO(element_bytes(text, MESH_ELEMENT))
    bounds = trimesh.load_scene(glb, file_type="glb").bounds
    np.testing.assert_allclose(bounds, trimesh.load_scene(tmp_path / "mesh.glb").bounds, atol=1e-5)
    cloud = read_gaussian_ply(tmp_path / "splats.ply")
    if orient == "none":
        cloud = moved_cloud(cloud, GLB_AXES)
    assert fidelity(cloud, read_page_gaussians(page, lambda _: None)).position < 1e-3
    # It is not written again, and goes with the results that it shows.
    before = page.stat().st_mtime_ns
    write_index(tmp_path, **words)
    assert page.stat().st_mtime_ns == before
    write_result_folder(tmp_path, made, scene, PlacementOptions(scale_factor=3.0))
    assert not page.exists()


def test_results_that_fit_into_no_page_are_complete_without_it(inputs, tmp_path, monkeypatch):
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    made = FinalResults(inputs.obj, inputs.ply, lambda: read_gaussian_ply(inputs.ply))
    write_result_folder(tmp_path, made, scene, PlacementOptions())
    monkeypatch.setattr(web_page, "_LARGEST", 1000)
    lines: list[str] = []
    assert write_index(tmp_path, upright=True, lit=False, notify=lines.append) is None
    (line,) = lines
    assert line.startswith("no index.html: ")
    assert not (tmp_path / "index.html").exists()
    # A mesh without a texture has no page.
    (tmp_path / "mesh.obj").unlink()
    assert write_index(tmp_path, upright=True, lit=False, notify=pytest.fail) is None


@contextmanager
def offline_browser() -> Iterator[BrowserContext]:
    """A Chromium that draws 3D without a GPU and has no network."""
    driver = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium")
    software = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with driver.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=software)
        yield chromium.new_context(offline=True, viewport={"width": 600, "height": 340})


@pytest.mark.slow
def test_a_report_frames_the_page_once_it_is_asked_for(page, inputs):
    report = Page("A report")
    report.frame(page, page.parent, "Turn it")
    path = page.with_name("report.html")
    path.write_text(report.html(), encoding="utf-8")
    with offline_browser() as context:
        tab, asked = context.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        assert page.as_uri() not in asked
        tab.click("summary")
        drawn = f'body[data-gaussians="{len(inputs.cloud)}"]'
        tab.frame_locator("iframe").locator(drawn).wait_for(timeout=60_000)
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked)


@pytest.mark.slow
def test_a_browser_without_network_draws_both_under_one_camera(page, inputs):
    pictures = {}
    with offline_browser() as context:
        tab, asked = context.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_selector(f'body[data-gaussians="{len(inputs.cloud)}"]', timeout=60_000)
        for show in ("both", "mesh", "gaussians"):
            tab.click(f"button[data-show={show}]")
            tab.wait_for_timeout(4_000)
            picture = Image.open(io.BytesIO(tab.locator("canvas").screenshot()))
            pictures[show] = np.asarray(picture.convert("RGB"), float)
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked)
    left, right = np.split(pictures["both"], 2, axis=1)
    for picture in (left, right, pictures["mesh"], pictures["gaussians"]):
        assert picture.std() > 5
    assert np.abs(left - right).mean() > 1
    assert np.abs(pictures["mesh"] - pictures["gaussians"]).mean() > 1
