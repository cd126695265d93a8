# SPDX-License-Identifier: Apache-2.0
"""A dataclass field is a flag, a value and a row of a table."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path

import pytest

from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.texture.texturing import TextureOptions
from sugar_pipeline.pipeline.pipeline_flags import full_parser, train_parser
from sugar_trainers.stage_config import CoarseConfig, RefineConfig
from sugar_utils.errors import OtherSettings, UserError
from sugar_utils.flags import TASKS, HelpFormatter, Parser, positive_int
from sugar_utils.settings import (
    add_flags,
    changed_flags,
    flag,
    flags_of,
    from_args,
    without_flags,
    write_settings,
)
from tests.support.flag_tables import flag_rows


@dataclass(frozen=True)
class Inner:
    steps: int = flag(4, "how often", group="inner", short="-k", parse=positive_int)
    times: tuple[int, ...] = flag((1, 2), "when", group="inner")


@dataclass(frozen=True, kw_only=True)
class Outer:
    scene: Path = flag(MISSING, "what", group="outer", short="-s", parse=Path, missing="give one")
    views: int = flag(1, "of a step; unset: all", group="outer", unset=True)
    box: str | None = flag(None, "its size, < 5", group="outer", no_effect_when="with --scene x")
    inner: Inner = field(default_factory=Inner)
    other: Inner = without_flags(Inner)
    plain: int = 7


def parsed(*words: str):
    parser = Parser(formatter_class=HelpFormatter)
    add_flags(parser, Outer)
    return parser.parse_flags(list(words))


def test_fields_become_flags_and_flags_become_fields():
    made = from_args(Outer, parsed("-s", "x", "-k", "9", "--times", "3", "4", "--box", "b"))
    assert made == Outer(scene=Path("x"), box="b", inner=Inner(9, (3, 4)), other=Inner())


def test_what_is_not_given_keeps_its_default():
    assert from_args(Outer, parsed("-s", "x")) == Outer(scene=Path("x"))
    assert from_args(Outer, parsed("-s", "x", "--views", "3")).views == 3


def test_what_must_be_given_is_asked_for_by_its_names():
    with pytest.raises(UserError, match="-s/--scene is missing; give one"):
        from_args(Outer, parsed())


def test_fields_that_follow_from_something_else_are_not_read():
    made = from_args(Outer, parsed("-k", "9"), scene=Path("y"), inner=Inner(2), plain=3)
    assert (made.scene, made.inner, made.plain) == (Path("y"), Inner(2), 3)


def test_a_check_of_a_field_is_a_check_of_its_flag(capsys):
    with pytest.raises(SystemExit):
        parsed("--steps", "0")
    assert "--steps" in capsys.readouterr().err


def test_headings_choose_and_a_flag_that_is_there_is_not_added_again():
    parser = Parser()
    add_flags(parser, Outer, "inner", steps={"default": 5})
    add_flags(parser, Inner)
    assert parser.parse_flags([]) == {"steps": 5, "times": [1, 2]}
    assert [one.name for one in flags_of(Outer, "outer")] == ["scene", "views", "box"]


def test_a_table_has_what_a_field_says():
    parser = Parser()
    add_flags(parser, Outer)
    *_, box = flag_rows(parser, "outer")
    assert box == "| `--box` | – | its size, &lt; 5 |"
    with pytest.raises(ValueError, match="no heading 'x'"):
        flag_rows(parser, "x")


def test_help_says_when_a_flag_does_nothing():
    parser = Parser(formatter_class=HelpFormatter)
    add_flags(parser, Outer)
    text = " ".join(parser.format_help().split())
    assert "its size, < 5; without effect: with --scene x" in text
    assert "how often (default: 4)" in text


@pytest.mark.parametrize("parser_of_script", [train_parser, full_parser])
def test_help_shows_common_flags_by_task_and_help_all_every_flag(parser_of_script, capsys):
    parser = parser_of_script("Train.")
    short = parser.format_help()
    for task in TASKS:
        assert f"\n{task}:\n" in short
    shown = [line for line in short.splitlines() if line.startswith("  -")]
    assert 20 <= len(shown) <= 27
    assert "examples:\n  python train" in short
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help_all"])
    assert ended.value.code == 0
    whole = capsys.readouterr().out
    for action in parser._actions:
        assert f"{action.option_strings[-1]}" in whole
    assert len(whole) > 3 * len(short)


def test_a_field_that_is_added_to_the_settings_is_a_flag_that_reaches_them():
    """The recipe "Add a flag" of DOCS/ARCHITECTURE.md: one line in the settings."""

    @dataclass(frozen=True)
    class WithAFlag(CoarseConfig):
        blur: float = flag(0.5, "width of a blur", group="coarse stage")

    parser = Parser()
    add_flags(parser, WithAFlag, "coarse stage")
    assert from_args(WithAFlag, parser.parse_flags(["--blur", "2"])).blur == 2.0
    assert "| `--blur` | 0.5 | width of a blur |" in flag_rows(parser, "coarse stage")


def test_every_flag_of_the_program_has_a_help_text_and_a_heading():
    for settings in (CoarseConfig, RefineConfig, VanillaConfig, MeshOptions, TextureOptions):
        for one in flags_of(settings):
            assert one.help, one.name
            assert one.group, one.name


def test_changed_flags_are_named_as_they_are_typed(tmp_path):
    assert changed_flags(tmp_path, {"seed": 1}) == []
    write_settings(tmp_path, {"schedule_scale": 0.05, "bbox": (0, 1), "force": True, "seed": 3})
    flags = {"schedule_scale": 0.06, "bbox": (0, 1), "preset": "fast", "overwrite": True}
    assert changed_flags(tmp_path, flags) == [
        "--schedule_scale 0.05 -> 0.06",
        "--seed 3 -> unset",
        "--preset unset -> fast",
    ]


def test_an_error_names_flags_in_place_of_settings_but_keeps_inputs():
    differences = ["a.b: 1 → 2", "photographs: x.jpg changed"]
    message = f"run ({'; '.join(differences)}); choose another -m"
    error = OtherSettings(message, Path("run"), differences, "-m")
    named = error.in_flags(["--a 1 -> 2"], "--output_dir")
    assert str(named) == (
        "run (--a 1 -> 2; photographs: x.jpg changed); choose another --output_dir"
    )
    assert str(error.in_flags([])) == message
