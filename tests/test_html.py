# SPDX-License-Identifier: Apache-2.0
"""Pages need nothing but themselves, hold any text, and never cost a result."""

from __future__ import annotations

import base64
import io
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sugar_utils.html import (
    Link,
    Page,
    Picture,
    duration_text,
    flattened,
    value_text,
    write_page,
)

HOSTILE = "<script>alert(\"x\")</script> & 'é'"
VOID = {"meta", "img", "br"}


class Structure(HTMLParser):
    """Checks that tags nest, and collects attributes and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def noise(height=40, width=60) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def full_page(root: Path) -> Page:
    """A page with one of everything, all of it with hostile text."""
    (root / "a b#.txt").write_text("12345")
    page = Page(HOSTILE, HOSTILE)
    page.heading(HOSTILE)
    page.paragraph(HOSTILE, note=True)
    page.facts([(HOSTILE, HOSTILE)])
    page.pairs([(HOSTILE, HOSTILE)], folded=HOSTILE)
    page.table((HOSTILE, "n"), [(HOSTILE, 1234567)])
    page.pictures([Picture(noise(), HOSTILE)])
    page.wide_picture(Picture(noise(), HOSTILE))
    page.files([root / "a b#.txt", root / "absent"], root)
    return page


def test_everything_is_escaped_and_tags_nest(tmp_path):
    text = full_page(tmp_path).html()
    assert "<script" not in text
    structure = Structure(text)
    assert structure.text.count('<script>alert("x")</script>') >= 9
    assert structure.of("img")[0]["alt"] == HOSTILE
    assert "1,234,567" in structure.text


def test_nothing_is_fetched_from_elsewhere(tmp_path):
    text = full_page(tmp_path).html()
    assert not re.search(r"https?:|@import|url\(|<link|<script|<iframe", text)
    structure = Structure(text)
    assert all(image["src"].startswith("data:image/") for image in structure.of("img"))
    assert [a["href"] for a in structure.of("a")] == ["a%20b%23.txt"]
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in (
        structure.of("meta")
    )


def pixels_of(page: Page) -> list[Image.Image]:
    uris = [image["src"].split("base64,")[1] for image in Structure(page.html()).of("img")]
    return [Image.open(io.BytesIO(base64.b64decode(uri))) for uri in uris]


def test_pictures_are_inside_small_enough_and_in_the_smaller_format(tmp_path):
    Image.fromarray(noise(100, 400)).save(tmp_path / "p.png")
    flat = np.full((30, 50, 3), (10, 200, 30), dtype=np.uint8)
    page = Page("t")
    page.pictures([Picture(flat), Picture(noise(), "c"), Picture(tmp_path / "p.png")], width=200)
    first, second, third = pixels_of(page)
    assert (first.format, second.format) == ("PNG", "JPEG")
    assert np.array_equal(np.asarray(first), flat)
    assert (second.size, third.size) == ((60, 40), (200, 50))


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"malformed")
    page = Page("t")
    page.wide_picture(Picture(tmp_path / "broken.png", "views"))
    page.pictures([Picture(tmp_path / "absent.png", "others")])
    text = Structure(page.html()).text
    assert "views (no picture:" in text
    assert "others (no picture:" in text


def test_empty_parts_leave_no_trace(tmp_path):
    page = Page("t")
    before = page.html()
    page.facts([])
    page.pairs([])
    page.table(("a",), [])
    page.pictures([])
    page.files([tmp_path / "absent"], tmp_path)
    assert page.html() == before


def test_files_and_folders_are_listed_with_their_sizes(tmp_path):
    folder = tmp_path / "run" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(3000))
    (folder / "b").write_bytes(bytes(72))
    page = Page("t")
    page.files([folder], tmp_path / "report")
    structure = Structure(page.html())
    assert structure.of("a")[0]["href"] == "../run/tensorboard"
    assert "3.00 KiB" in structure.text


def test_links_without_a_relative_path_are_text(monkeypatch):
    def other_drive(*_):
        raise ValueError("path is on mount 'D:'")

    monkeypatch.setattr("sugar_utils.html.os.path.relpath", other_drive)
    assert Link.to(Path("x"), Path("y")) == Link("x")
    page = Page("t")
    page.table(("file",), [(Link("x"),)])
    page.frame(Path("x"), Path("y"), "title")
    assert "<a" not in page.html()
    assert "<iframe" not in page.html()


def test_a_framed_page_is_loaded_when_its_title_is_clicked(tmp_path):
    page = Page("t")
    page.frame(tmp_path / "a b" / "index.html", tmp_path / "run", HOSTILE)
    structure = Structure(page.html())
    (frame,) = structure.of("iframe")
    assert frame["src"] == "../a%20b/index.html"
    assert frame["loading"] == "lazy"
    assert structure.of("a")[0]["href"] == frame["src"]
    # What is folded is not on the screen.
    assert structure.tags.index(("details", {})) < structure.tags.index(("iframe", frame))
    assert "<script" not in page.html()


def test_writing_is_all_or_nothing_and_never_raises(tmp_path, monkeypatch):
    said: list[str] = []
    path = tmp_path / "sub" / "r.html"
    assert write_page(path, lambda: Page("one"), said.append) == path
    assert "one" in path.read_text(encoding="utf-8")
    assert said == []

    def broken() -> Page:
        raise RuntimeError("a defect\nof the report")

    assert write_page(path, broken, said.append) is None
    assert "a defect of the report" in said[0]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sugar_utils.files._flush", full)
    assert write_page(path, lambda: Page("two"), said.append) is None
    assert "No space left" in said[1]
    assert "\n" not in said[0] + said[1]
    assert "one" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["r.html"]


def test_a_report_where_a_folder_is_in_the_way_is_only_told(tmp_path):
    said: list[str] = []
    (tmp_path / "r.html").mkdir()
    assert write_page(tmp_path / "r.html", lambda: Page("t"), said.append) is None
    assert len(said) == 1


def test_numbers_read_well():
    assert [duration_text(x) for x in (8.34, 59.99, 245, 7_800)] == [
        "8.3 s",
        "1 min 00 s",
        "4 min 05 s",
        "2 h 10 min",
    ]
    assert [value_text(x) for x in (None, True, 12345, 0.5, [1, 2.5], "a")] == [
        "–",
        "yes",
        "12,345",
        "0.5",
        "1, 2.5",
        "a",
    ]


def test_settings_are_flat_and_as_one_would_type_them():
    nested = {"seed": 12345, "rates": {"means": 1.6e-06, "on": True}, "box": [0, 1.5], "no": None}
    assert flattened(nested) == [
        ("seed", "12345"),
        ("rates.means", "1.6e-06"),
        ("rates.on", True),
        ("box", "0, 1.5"),
        ("no", None),
    ]


def test_controls_in_names_are_spelled_and_bytes_that_are_no_text_do_not_end_a_page(tmp_path):
    name = "a\x1b[2J\nb\udcff.txt"
    page = Page(name)
    page.pairs([(name, name)])
    if os.name != "nt":
        (tmp_path / name).write_text("x", encoding="utf-8")
        page.files([tmp_path / name], tmp_path)
        assert "%1B%5B2J%0Ab%FF.txt" in page.html()
    assert "\x1b" not in page.html()
    assert r"a\x1b[2J\nb\udcff.txt" in Structure(page.html()).text
    assert write_page(tmp_path / "page.html", lambda: page, pytest.fail) is not None
