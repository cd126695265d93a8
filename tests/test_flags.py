# SPDX-License-Identifier: Apache-2.0
"""Flag values, and parser errors in one line."""

import argparse
from pathlib import Path

import pytest

from sugar_utils.flags import (
    IntList,
    Parser,
    boolean,
    finite_float,
    integer,
    name_list,
    non_negative_float,
    non_negative_int,
    optional_str,
    parse_int_list,
    positive_float,
    positive_int,
    vector3,
)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a.jpg,scan 1 (2).jpg , b.jpg,", ("a.jpg", "scan 1 (2).jpg", "b.jpg")),
        ('"scan 1, north #2.jpg", b.jpg', ("scan 1, north #2.jpg", "b.jpg")),
        ("", ()),
    ],
)
def test_names_in_a_list_may_have_spaces_and_in_quotes_commas(text, names):
    assert name_list(text) == names


def make_parser() -> Parser:
    parser = Parser(prog="train.py")
    parser.add_argument("-s", "--scene_path", required=True)
    parser.add_argument("--eval", type=boolean, default=True)
    parser.add_argument("-b", "--bboxmin", type=vector3)
    parser.add_argument("-f", "--refinement_iterations", type=positive_int, default=15_000)
    parser.add_argument("--refinement_time", type=optional_str)
    parser.add_argument("--test_iterations", action=IntList, default=[7000])
    parser.add_argument("-r", choices=("sdf", "density", "dn_consistency"), default="sdf")
    return parser


def fails(capsys, *words: str) -> str:
    """The one line that the parser prints for these arguments."""
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


@pytest.mark.parametrize("word", ["yes", "true", "t", "y", "1", "True", "YES", " T "])
def test_true_words(word):
    assert boolean(word) is True


@pytest.mark.parametrize("word", ["no", "false", "f", "n", "0", "False", "NO"])
def test_false_words(word):
    assert boolean(word) is False


@pytest.mark.parametrize("word", ["", "maybe", "2", "None", "on"])
def test_other_words_are_refused_and_the_legal_ones_listed(word):
    with pytest.raises(argparse.ArgumentTypeError, match="yes, true, t, y, 1.*no, false, f, n, 0"):
        boolean(word)


def test_integers_accept_underscores():
    assert integer("7_000") == 7000
    assert integer("-3") == -3
    assert positive_int("1") == 1
    assert non_negative_int("0") == 0


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (integer, "7.5"),
        (integer, "7__000"),
        (positive_int, "0"),
        (non_negative_int, "-1"),
        (finite_float, "nan"),
        (finite_float, "ten"),
        (positive_float, "0"),
        (positive_float, "inf"),
        (non_negative_float, "-0.5"),
        (vector3, "1,2"),
        (vector3, "(1,2,x)"),
        (vector3, "1,2,3,4"),
        (vector3, "1,2,inf"),
        (parse_int_list, "7000 8k"),
        (parse_int_list, "[7000, 8000"),
    ],
)
def test_bad_values_are_refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


@pytest.mark.parametrize("text", ["(-1,2.5,3e-1)", "-1,2.5,0.3", " ( -1 , 2.5 , .3 ) "])
def test_vector_spellings(text):
    assert vector3(text) == (-1.0, 2.5, 0.3)


def test_the_word_none_unsets():
    assert optional_str("None") is None
    assert optional_str("none.ply") == "none.ply"
    assert vector3("None") is None


@pytest.mark.parametrize(
    "words",
    [
        ["7_000", "8000"],
        ["7000,8000"],
        ["[7000, 8000]"],
        ["[7000,", "8000]"],
        ["7000,", "8000"],
    ],
)
def test_list_spellings(words):
    args = make_parser().parse_args(["-s", "x", "--test_iterations", *words, "--eval", "no"])
    assert args.test_iterations == [7000, 8000]
    assert args.eval is False


def test_list_can_be_empty_negative_or_default():
    parser = make_parser()
    assert parser.parse_args(["-s", "x", "--test_iterations", "[]"]).test_iterations == []
    assert parser.parse_args(["-s", "x", "--test_iterations", "-1"]).test_iterations == [-1]
    assert parser.parse_args(["-s", "x"]).test_iterations == [7000]


def test_abbreviations_dashes_and_negative_vectors_are_accepted():
    args = make_parser().parse_args(
        ["--scene-path", "a-b", "--refinement_iter", "2_000", "-b", "-1,-2.5,-3e-2"]
    )
    assert args.scene_path == "a-b"
    assert args.refinement_iterations == 2000
    assert args.bboxmin == (-1.0, -2.5, -0.03)
    assert make_parser().parse_args(["-s", "x", "--refinement-time=so-on"]).refinement_time
    assert make_parser().parse_args(["-s", "x", "--bboxmin=-1,2,3"]).bboxmin == (-1.0, 2.0, 3.0)


def test_two_dashes_after_an_equals_sign_are_a_value(capsys):
    parser = Parser(prog="x")
    parser.add_argument("--stop", choices=("a", "b"))
    parser.add_argument("--number", type=int)
    parser.add_argument("--name")
    for flag in ("--stop=--", "--number=--"):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args([flag])
        assert caught.value.code == 2
        assert "--'" in capsys.readouterr().err
    assert parser.parse_args(["--name=--"]).name == "--"


def test_unknown_flag_gets_the_nearest_name(capsys):
    assert "--scene_pat; did you mean" not in fails(capsys, "-s", "x", "--zzzz", "1")
    assert "unknown flag --test_iteratoins; did you mean --test_iterations?" in fails(
        capsys, "-s", "x", "--test_iteratoins", "5"
    )


def test_errors_are_one_line_that_names_the_flag(capsys):
    assert "--scene_path" in fails(capsys)
    assert "--eval" in fails(capsys, "-s", "x", "--eval", "maybe")
    assert "dn_consistency" in fails(capsys, "-s", "x", "-r", "depth")
    assert "'8k' is not a whole number" in fails(capsys, "-s", "x", "--test_iterations", "8k")
    assert "could match" in fails(capsys, "-s", "x", "--refinement", "1")
    assert "unexpected argument 'stray'" in fails(capsys, "-s", "x", "stray")


def test_the_beginning_of_a_flag_is_taken_for_it_and_that_is_said(capsys):
    args = make_parser().parse_args(["-s", "a", "--refinement_iter", "7"])
    assert args.refinement_iterations == 7
    note = "note: --refinement_iter is taken for --refinement_iterations\n"
    assert capsys.readouterr().out == note
    make_parser().parse_args(["-s", "a", "--refinement_iterations", "7"])
    assert capsys.readouterr().out == ""


def test_a_truth_value_that_is_missing_is_named(capsys):
    assert "argument --eval: needs True or False behind it" in fails(capsys, "-s", "a", "--eval")
