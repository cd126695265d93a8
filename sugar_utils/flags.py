# SPDX-License-Identifier: Apache-2.0
"""Command-line values, and a parser whose errors are one line."""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from sugar_utils.errors import UserError, explained, printable
from sugar_utils.torchrun import is_follower

TASKS = ("input", "result", "time and memory", "run")
"""Headings of the common flags in ``--help``."""

_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")
AUTO = "auto"
Automatic = int | Literal["auto"]  # a whole number, or what the program chooses
Number = TypeVar("Number", int, float)
_SIGNED_VALUES = re.compile(r"^-(\d|\.\d)[-+\d.,eE_\s]*$")


def boolean(text: str) -> bool:
    """``yes true t y 1`` or ``no false f n 0`` in any case; anything else is an error."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither true ({', '.join(_TRUE)}) nor false ({', '.join(_FALSE)})"
    )


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def finite_float(text: str) -> float:
    """A number; infinity and not-a-number are errors."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _that(parse: Callable[[str], Number], fits: Callable[[Number], bool], must: str) -> Any:
    """Numbers of a kind that fit; ``must`` says of the others what they must be."""

    def number(text: str) -> Number:
        value = parse(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} must {must}")
        return value

    return number


positive_int = _that(integer, lambda n: n >= 1, "be at least 1")
non_negative_int = _that(integer, lambda n: n >= 0, "not be negative")
positive_float = _that(finite_float, lambda x: x > 0, "be greater than 0")
acute_angle = _that(finite_float, lambda x: 0 < x < 90, "lie between 0 and 90")
non_negative_float = _that(finite_float, lambda x: x >= 0, "not be negative")
unit_float = _that(finite_float, lambda x: 0 <= x <= 1, "lie between 0 and 1")
share = _that(finite_float, lambda x: 0 <= x < 1, "be at least 0 and less than 1")
open_share = _that(finite_float, lambda x: 0 < x < 1, "lie between 0 and 1; 0.3 is usual")


def positive_or_auto(text: str) -> Automatic:
    """A whole number of at least 1, or auto."""
    return AUTO if text == AUTO else positive_int(text)


def boolean_or_auto(text: str) -> bool | Literal["auto"]:
    """True, false, or what the program finds out."""
    return AUTO if text.strip().lower() == AUTO else boolean(text)


def automatic_boolean(text: str) -> bool | None:
    """True, false, or auto: None, as where the flag is not given."""
    return None if text == AUTO else boolean(text)


def optional_str(text: str) -> str | None:
    """A string, where the word ``None`` means that the flag is not set."""
    return None if text == "None" else text


def vector3(text: str) -> tuple[float, float, float] | None:
    """Three numbers as ``(x,y,z)`` or ``x,y,z``; the word ``None`` means not set."""
    if text == "None":
        return None
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    parts = inner.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers; write (x,y,z)")
    x, y, z = (finite_float(part) for part in parts)
    return x, y, z


def name_list(text: str) -> tuple[str, ...]:
    """Names separated by commas; one that has a comma stands in quotes."""
    row = next(csv.reader([text], skipinitialspace=True), [])
    return tuple(name for name in (part.strip() for part in row) if name)


def require_box(low: Sequence[float] | None, high: Sequence[float] | None) -> None:
    """Check that ``--bboxmin`` and ``--bboxmax`` are both absent or span a box."""
    if (low is None) != (high is None):
        given, absent = ("bboxmin", "bboxmax") if high is None else ("bboxmax", "bboxmin")
        raise UserError(f"--{given} is given without --{absent}; give both corners of the box")
    if low is not None and any(a >= b for a, b in zip(low, high, strict=True)):
        raise UserError(
            f"--bboxmin {tuple(low)} is not below --bboxmax {tuple(high)} on every axis"
        )


def parse_int_list(text: str) -> list[int]:
    """Whole numbers separated by spaces or commas, in square brackets or not."""
    inner = text.strip()
    if inner.startswith("[") != inner.endswith("]"):
        raise argparse.ArgumentTypeError(f"{text!r} has an unmatched bracket")
    if inner.startswith("["):
        inner = inner[1:-1]
    return [integer(word) for word in re.split(r"[\s,]+", inner) if word]


class IntList(argparse.Action):
    """Stores ``7000 8000``, ``7000,8000`` and ``[7000, 8000]`` alike as a list of integers.

    Use as ``parser.add_argument("--test_iterations", action=IntList, default=[7000])``.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        kwargs.setdefault("nargs", "+")
        super().__init__(option_strings, dest, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Parse all words given after the flag together, as a bracket may span several."""
        text = values if isinstance(values, str) else " ".join(str(value) for value in values or ())
        try:
            setattr(namespace, self.dest, parse_int_list(text))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class Repeated(argparse.Action):
    """May be given several times: the last value under its name, all under ``all_`` and that."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        earlier = getattr(namespace, f"all_{self.dest}", [])
        setattr(namespace, f"all_{self.dest}", [*earlier, values])
        setattr(namespace, self.dest, values)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help
        no_effect_when = getattr(action, "no_effect_when", "")
        unnamed = (None, False, argparse.SUPPRESS)
        if no_effect_when:
            text = f"{text}; without effect: {no_effect_when}"
        if action.default in unnamed or action.default == []:
            return text
        return f"{text} (default: %(default)s)"


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **kwargs)
        self.default = argparse.SUPPRESS

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """``ArgumentParser`` with one-line errors, suggestions and forgiving spellings.

    Unambiguous beginnings of a flag are accepted (``--refinement_iter``), so are dashes for
    underscores (``--scene-path``) and values that begin with a minus sign (``-b -1,-2,-3``).
    Wrong input prints one line, ``error: ...``, and exits with code 2. With
    examples as ``epilog``, ``--help`` shows the flags that have a task and ``--help_all`` all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument("--help_all", action=_HelpAll, help="show all flags and exit")
        self.add_argument(
            "--config",
            dest="config_file",
            type=Path,
            default=argparse.SUPPRESS,
            metavar="FILE.toml",
            help="values of flags, name = value in a line; flags win over it",
        )
        # argparse takes a word that matches for a value and not for a flag; the original pattern
        # knows single numbers only.
        self._negative_number_matcher = _SIGNED_VALUES

    def format_help(self) -> str:
        """The common flags by task, or all flags of a parser that gives no examples."""
        if not self.epilog:
            return super().format_help()
        tasks: dict[str, list[argparse.Action]] = {name: [] for name in TASKS}
        for action in self._actions:
            if getattr(action, "task", ""):
                tasks[action.task].append(action)  # type: ignore[attr-defined]
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for name, actions in tasks.items():
            formatter.start_section(name)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text("--help_all lists all flags")
        return formatter.format_help()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """As in argparse, after dashes inside flag names became underscores."""
        words = [self._underscored(word) for word in (sys.argv[1:] if args is None else args)]
        words = self._with_scene_flags(words)
        self._tell_beginnings(words)
        found, extra = super().parse_known_args(words, namespace)
        file = getattr(found, "config_file", None)
        if file is None:
            return found, extra
        unset = argparse.Namespace(**{action.dest: self for action in self._actions})
        given = vars(super().parse_known_args(words, unset)[0])
        values = {k: v for k, v in read_config(file).items() if given.get(k, self) is self}
        # What is there before the words are parsed takes the place of the defaults.
        found, extra = super().parse_known_args(words, self.with_values(values, file))
        del found.config_file
        return found, extra

    def with_values(
        self, values: Mapping[str, Any], file: Path | None = None
    ) -> argparse.Namespace:
        """Values by names of flags, checked and converted as on the command line.

        They are numbers, strings, booleans and lists of these; ``file`` is where they stand, None
        for the arguments of a function.
        """
        found = argparse.Namespace()
        flags = {action.dest: action for action in self._actions if action.option_strings}
        for name in ("help", argparse.SUPPRESS, "config_file"):
            flags.pop(name, None)
        for name, value in values.items():
            place = "" if file is None else f"{file}, line {_line_of(name, file)}: "
            action = flags.get(name.replace("-", "_"))
            if action is None:
                raise UserError(f"{place}unknown setting {name}; {_nearest(name, flags)}")
            try:
                self._take(action, value, found)
            except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
                reason = getattr(error, "message", None) or error
                raise UserError(f"{place}{name}: {reason}") from None
        return found

    def _take(self, action: argparse.Action, value: Any, found: argparse.Namespace) -> None:
        """Let an action keep a value in a namespace."""
        items = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, list | tuple | Mapping) for item in items):
            raise argparse.ArgumentTypeError(
                "neither a number, a string, true or false, nor a list"
            )
        if action.nargs == 0:
            setattr(found, action.dest, boolean(str(value)))
            return
        words = [str(item) for item in items]
        several = isinstance(action, Repeated)
        if action.nargs is None and not several:
            quoted = [f'"{word}"' if "," in word and len(words) > 1 else word for word in words]
            words = [",".join(quoted)]
        for part in [[word] for word in words] if several else [words]:
            if self._match_argument(action, "A" * len(part)) != len(part):
                raise argparse.ArgumentError(action, f"takes other than {len(part)} values")
            action(self, found, self._get_values(action, part), action.option_strings[-1])

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """As in argparse; an unknown flag is named with the one it resembles most."""
        namespace, extra = self.parse_known_args(args, namespace)
        if extra:
            flags = [word.split("=", 1)[0] for word in extra if word.startswith("-")]
            if flags:
                advice = _nearest(flags[0], self._option_string_actions)
                self.error(f"unknown flag {flags[0]}; {advice}")
            self.error(f"unexpected argument {extra[0]!r}; values follow a flag, see --help_all")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; of several processes the first one prints."""
        line = printable(" ".join(message.split()))
        self.exit(2, None if is_follower() else f"error: {line}\n")

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Match as argparse does; the error about a missing truth value names both values."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            if action.type is boolean and action.nargs is None:
                raise argparse.ArgumentError(action, "needs True or False behind it") from error
            raise

    def _tell_beginnings(self, words: Sequence[str]) -> None:
        """Say which flags are taken for words that are only the beginning of one."""
        for word in words:
            name = word.split("=", 1)[0]
            if not name.startswith("--") or name == "--" or name in self._option_string_actions:
                continue
            flags = [flag for flag in self._option_string_actions if flag.startswith(name)]
            if len(flags) == 1 and not is_follower():
                print(f"note: {printable(name)} is taken for {flags[0]}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As in argparse, but ``--flag=--`` is a value; Pythons before 3.13 make an empty list."""
        if action.option_strings and arg_strings == ["--"] and action.nargs in (None, "?"):
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _with_scene_flags(self, words: list[str]) -> list[str]:
        """Put ``-s`` before words without a flag that come first: ``sugar run SCENE``.

        One word only, where ``-s`` takes no more; not where such words have a meaning of their own.
        """
        action = self._option_string_actions.get("-s")
        if action is None or any(not other.option_strings for other in self._actions):
            return words
        n_scenes = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
        if not isinstance(action, Repeated):
            n_scenes = min(n_scenes, 1)
        scenes = [word for scene in words[:n_scenes] for word in ("-s", scene)]
        return [*scenes, *words[n_scenes:]]

    def _underscored(self, word: str) -> str:
        if not word.startswith("--") or word == "--":
            return word
        name, equals, value = word[2:].partition("=")
        if f"--{name}" in self._option_string_actions:
            return word
        return f"--{name.replace('-', '_')}{equals}{value}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "--help_all lists all flags"


def read_config(path: Path) -> dict[str, Any]:
    """What a file of settings holds, by name."""
    # Here and not above: without such a file, commands start sooner.
    from sugar_utils.files import decoded, require_regular_file

    if not path.is_dir():
        require_regular_file(path, missing_ok=True)
    advice = "give a TOML file, name = value"
    with explained(f"--config {path}:", advice, OSError, ValueError, RecursionError):
        return tomllib.loads(decoded(path.read_bytes()))


def config_text(values: Mapping[str, Any], comment: str) -> str:
    """The file of settings that :func:`read_config` reads; None is left out."""
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}\n"
        for name, value in values.items()
        if value is not None
    ]
    return f"# {comment}\n{''.join(lines)}"


def _line_of(name: str, file: Path) -> int | str:
    """The line in which a name is given its value, or opens a table."""
    pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[].=]""")
    from sugar_utils.files import decoded

    lines = enumerate(decoded(file.read_bytes()).splitlines(), start=1)
    return next((number for number, line in lines if pattern.match(line)), "?")
