# SPDX-License-Identifier: Apache-2.0
"""The viewer's pages in a real browser, drawn without a graphics card."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gaussian_splatting.scenes.reference_layout import read_cameras_json
from sugar_utils.console import Console
from sugar_viewer.result_search import TEXTURED, VANILLA
from sugar_viewer.view_run import ViewOptions
from sugar_viewer.view_run import view as serve
from tests.support.command_line import free_port
from tests.support.command_words import parse
from tests.support.tiny_scene import newest, start
from tests.test_resume import vanilla
from tests.test_viewing import output  # noqa: F401  (a fixture)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SOFTWARE = (
    "--no-sandbox",
    "--use-gl=angle",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
)
MIDDLE = {"x": 0, "y": 150, "width": 500, "height": 450}
"""Part of the page that no panel lies on."""

pytestmark = pytest.mark.slow


@contextmanager
def browser_at(port: int) -> Iterator:
    """A browser that has opened the page, as soon as there is one."""
    driver = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("viser")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium")
    with driver.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=list(SOFTWARE))
        page, asked = opened.new_page(viewport={"width": 900, "height": 700}), []
        page.on("request", lambda request: asked.append(request.url))
        for _ in range(150):
            try:
                page.goto(f"http://127.0.0.1:{port}")
                break
            except driver.Error:
                page.wait_for_timeout(200)
        yield page
        opened.close()
    # A page that needs nothing from elsewhere.
    own = (f"http://127.0.0.1:{port}", "blob:", "data:")
    assert [url for url in asked if not url.startswith(own)] == []


@contextmanager
def running(work: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """Something beside the browser; it has to end without an error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()
    assert failed == []


def test_a_browser_shows_results_and_saves_a_path(output, tmp_path):  # noqa: F811
    port, done, file = free_port(), threading.Event(), tmp_path / "path.json"
    words = (output.root, "--no-open", "--host", "127.0.0.1", "--port", port, "--path_file", file)
    options = parse(ViewOptions, [str(word) for word in words])
    work = lambda: serve(options, Console.silent(), done.is_set)  # noqa: E731
    with running(work, done.set), browser_at(port) as page:
        page.get_by_label(TEXTURED, exact=True).wait_for(timeout=60_000)
        page.wait_for_timeout(4_000)
        seen = [page.screenshot(clip=MIDDLE)]
        for label in (TEXTURED, VANILLA, "On"):
            page.get_by_label(label, exact=True).first.click()
            page.wait_for_timeout(4_000)
            seen.append(page.screenshot(clip=MIDDLE))
        assert len(set(seen)) == 4
        page.get_by_text("Camera path", exact=True).click()
        for turned in (False, True):
            if turned:
                page.mouse.move(200, 300)
                page.mouse.down()
                page.mouse.move(100, 320, steps=4)
                page.mouse.up()
                page.wait_for_timeout(1_500)
            page.get_by_role("button", name="Add this view").click()
        page.get_by_role("button", name="Save").click()
        page.wait_for_timeout(2_000)
    assert len(read_cameras_json(file)) == 120


def test_a_browser_shows_a_training_and_makes_it_wait(scene, tmp_path):
    port = free_port()
    run = vanilla(scene, 30_000, 5, "--viewer", port, "--viewer_host", "127.0.0.1")
    process = start(run.script, *run.command(tmp_path))
    try:
        with browser_at(port) as page:
            page.get_by_role("button", name="Pause").wait_for(timeout=60_000)
            page.wait_for_timeout(4_000)
            seen = page.screenshot(clip=MIDDLE)
            page.get_by_role("button", name="Pause").click()
            page.get_by_role("button", name="Go on").wait_for()
            page.wait_for_timeout(1_000)
            waits_at = newest(tmp_path / run.folder)
            page.wait_for_timeout(2_000)
            assert newest(tmp_path / run.folder) == waits_at
            page.get_by_role("button", name="Go on").click()
            page.wait_for_timeout(4_000)
            assert newest(tmp_path / run.folder) > waits_at
            assert page.screenshot(clip=MIDDLE) != seen
            assert "of 30,000" in page.content()
    finally:
        process.terminate()
    assert process.wait(60) == 143
