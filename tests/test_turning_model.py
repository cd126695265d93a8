# SPDX-License-Identifier: Apache-2.0
"""Meshes that turn inside a report: small, upright, and shown without a network."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch

from sugar_extractors.outputs import mesh_pictures as turning_preview
from sugar_extractors.outputs.mesh_pictures import preview_glb
from sugar_extractors.texture.texture_atlas import make_atlas
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.html import Page
from tests.support.mesh_scenes import cameras_around, sphere

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def textured_sphere(rings: int, square: int = 6) -> TexturedMesh:
    """With a picture of noise, which no format makes small."""
    shape = sphere(rings=rings)
    vertices = torch.tensor(shape.vertices, dtype=torch.float32)
    faces = torch.tensor(shape.faces)
    atlas = make_atlas("squares", vertices, faces, square)
    rng = np.random.default_rng(0)
    picture = rng.integers(256, size=(atlas.side, atlas.side, 3), dtype=np.uint8)
    return TexturedMesh(vertices, faces, atlas.uvs, torch.from_numpy(picture))


def content(glb: bytes) -> tuple[dict, bytes]:
    """The JSON and the binary part of a GLB."""
    length = struct.unpack_from("<I", glb, 12)[0]
    return json.loads(glb[20 : 20 + length]), glb[28 + length :]


def test_a_preview_has_two_materials_and_a_small_picture():
    told, binary = content(preview_glb(textured_sphere(12), cameras_around(5)))
    assert [m["name"] for m in told["materials"]] == ["mesh", "clay"]
    names = [v["name"] for v in told["extensions"]["KHR_materials_variants"]["variants"]]
    assert names == ["textured", "clay"]
    (primitive,) = told["meshes"][0]["primitives"]
    mappings = primitive["extensions"]["KHR_materials_variants"]["mappings"]
    assert [(m["material"], m["variants"]) for m in mappings] == [(0, [0]), (1, [1])]
    view = told["bufferViews"][told["images"][0]["bufferView"]]
    assert told["images"][0]["mimeType"] == "image/jpeg"
    assert binary[view["byteOffset"] :].startswith(b"\xff\xd8\xff")
    assert told["buffers"][0]["byteLength"] == len(binary)


def test_a_preview_stands_upright_on_the_ground():
    cameras = cameras_around(7)
    low = content(preview_glb(textured_sphere(12), cameras))[0]["accessors"][0]["min"]
    assert low[1] == pytest.approx(0.0, abs=1e-5)


def test_large_meshes_are_made_small(monkeypatch):
    monkeypatch.setattr(turning_preview, "MAX_TRIANGLES", 300)
    mesh = textured_sphere(40)
    told, _ = content(preview_glb(mesh, cameras_around(5)))
    assert mesh.n_faces > 3000
    assert told["accessors"][0]["count"] <= 900


def test_the_largest_preview_takes_three_megabytes():
    """Noise is the worst of all pictures; triangles count by their number alone."""
    corners = 3 * turning_preview.MAX_TRIANGLES * (12 + 8)
    rng = np.random.default_rng(1)
    side = turning_preview.TEXTURE_SIDE
    smooth = rng.integers(256, size=(side // 8, side // 8, 3), dtype=np.uint8)
    picture = torch.from_numpy(np.kron(smooth, np.ones((8, 8, 1), np.uint8)))
    assert corners + len(turning_preview.jpeg_bytes(picture)) < 3e6


def page_with_model() -> str:
    page = Page("A mesh")
    page.model(preview_glb(textured_sphere(10), cameras_around(5)))
    return page.html()


def test_a_page_without_models_has_no_script():
    assert "<script" not in Page("t").html()


def test_a_page_carries_the_component_once_and_loads_nothing():
    page = Page("t")
    glb = preview_glb(textured_sphere(8), cameras_around(5))
    page.model(glb)
    page.model(glb)
    text = page.html()
    assert text.count("<model-viewer ") == 2
    assert text.count("ModelViewerElement={}") == 1
    assert "src=" not in text.split("<script>")[0]
    assert "sourceMappingURL" not in text


@pytest.mark.slow
def test_a_browser_without_network_shows_the_model(tmp_path):
    driver = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium")
    (tmp_path / "report.html").write_text(page_with_model(), encoding="utf-8")
    software = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with driver.sync_playwright() as started:
        context = started.chromium.launch(executable_path=browser, args=software).new_context(
            offline=True
        )
        page, asked = context.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        page.locator("figure.model").scroll_into_view_if_needed()
        page.wait_for_selector("figure.model[data-shown]", timeout=60_000)
        seen = {}
        for show in ("textured", "clay", "wireframe"):
            page.click(f"[data-show={show}]")
            page.wait_for_timeout(2_000)
            seen[show] = page.locator("model-viewer").screenshot()
    assert len(set(seen.values())) == 3
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked)
