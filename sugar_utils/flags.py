# SPDX-License-Identifier: Apache-2.0
"""Command-line values, and a parser whose errors are one line."""

from __future__ import annotations

import argparse
import csv
import difflib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from sugar_utils.errors import ESCAPES, UserError, explained, printable
from sugar_utils.torchrun import is_follower

TASKS = ("input", "result", "time and memory", "run")
"""Headings of the common flags in ``--help``."""

# Attributes of an action that settings add to those of argparse.
NO_EFFECT_WHEN = "no_effect_when"
TASK = "task"

AUTO = "auto"
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")
Automatic = int | Literal["auto"]  # a whole number, or what the program chooses
Number = TypeVar("Number", int, float)
_WINDOWS_PATHS = rf"{ESCAPES}; write C:/Users/... or 'C:\Users\...'"
_SIGNED_VALUES = re.compile(r"^-(\d|\.\d)[-+\d.,eE_\s]*$")


def boolean(text: str) -> bool:
    """Parse ``yes true t y 1`` or ``no false f n 0``, in any case."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither true ({', '.join(_TRUE)}) nor false ({', '.join(_FALSE)})"
    )


def integer(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def finite_float(text: str) -> float:
    """Parse a number; infinity and not-a-number are errors."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _bounded(
    parse: Callable[[str], Number], is_valid: Callable[[Number], bool], rule: str
) -> Callable[[str], Number]:
    """Make a parser of numbers that are valid; errors say that others "must" follow the rule."""

    def number(text: str) -> Number:
        value = parse(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} must {rule}")
        return value

    return number


positive_int = _bounded(integer, lambda n: n >= 1, "be at least 1")
non_negative_int = _bounded(integer, lambda n: n >= 0, "not be negative")
positive_float = _bounded(finite_float, lambda x: x > 0, "be greater than 0")
acute_angle = _bounded(finite_float, lambda x: 0 < x < 90, "lie between 0 and 90")
non_negative_float = _bounded(finite_float, lambda x: x >= 0, "not be negative")
unit_float = _bounded(finite_float, lambda x: 0 <= x <= 1, "lie between 0 and 1")
share = _bounded(finite_float, lambda x: 0 <= x < 1, "be at least 0 and less than 1")
open_share = _bounded(finite_float, lambda x: 0 < x < 1, "lie between 0 and 1; 0.3 is usual")


def positive_or_auto(text: str) -> Automatic:
    """Parse a whole number of at least 1, or auto."""
    return AUTO if text == AUTO else positive_int(text)


def boolean_or_auto(text: str) -> bool | Literal["auto"]:
    """Parse true, false, or auto."""
    return AUTO if text.strip().lower() == AUTO else boolean(text)


def automatic_boolean(text: str) -> bool | None:
    """Parse true, false, or auto: None, as where the flag is not given."""
    return None if text == AUTO else boolean(text)


def optional_str(text: str) -> str | None:
    """Return the text, or None for the word ``None``: the flag is not set."""
    return None if text == "None" else text


def vector3(text: str) -> tuple[float, float, float] | None:
    """Parse three numbers, ``(x,y,z)`` or ``x,y,z``; the word ``None`` means not set."""
    if text == "None":
        return None
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    parts = inner.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers; write (x,y,z)")
    return finite_float(parts[0]), finite_float(parts[1]), finite_float(parts[2])


def name_list(text: str) -> tuple[str, ...]:
    """Parse names separated by commas; one that has a comma stands in quotes."""
    row = next(csv.reader([text], skipinitialspace=True), [])
    names = [part.strip() for part in row]
    return tuple(name for name in names if name)


def require_box(low: Sequence[float] | None, high: Sequence[float] | None) -> None:
    """Check that ``--bboxmin`` and ``--bboxmax`` are both absent or span a box.

    Raises:
        UserError: One is absent, or they span no box.
    """
    if low is None and high is None:
        return
    if low is None:
        raise UserError("--bboxmax is given without --bboxmin; give both corners of the box")
    if high is None:
        raise UserError("--bboxmin is given without --bboxmax; give both corners of the box")
    if any(a >= b for a, b in zip(low, high, strict=True)):
        raise UserError(
            f"--bboxmin {tuple(low)} is not below --bboxmax {tuple(high)} on every axis"
        )


def parse_int_list(text: str) -> list[int]:
    """Parse whole numbers separated by spaces or commas, in square brackets or not."""
    inner = text.strip()
    if inner.startswith("[") != inner.endswith("]"):
        raise argparse.ArgumentTypeError(f"{text!r} has an unmatched bracket")
    if inner.startswith("["):
        inner = inner[1:-1]
    return [integer(word) for word in re.split(r"[\s,]+", inner) if word]


class IntList(argparse.Action):
    """Action that parses ``7000 8000``, ``7000,8000`` and ``[7000, 8000]`` to the same integers.

    Use as ``parser.add_argument("--test_iterations", action=IntList, default=[7000])``.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        kwargs.setdefault("nargs", "+")
        super().__init__(option_strings, dest, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Parse all words after the flag together, as a bracket may span several."""
        words = [values] if isinstance(values, str) else values or ()
        text = " ".join(str(word) for word in words)
        try:
            setattr(namespace, self.dest, parse_int_list(text))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class Repeated(argparse.Action):
    """Action of a flag that may be repeated.

    The last value is stored under the flag's name, all values under ``all_NAME``.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Store one value more."""
        earlier = getattr(namespace, f"all_{self.dest}", [])
        setattr(namespace, f"all_{self.dest}", [*earlier, values])
        setattr(namespace, self.dest, values)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of ``--help`` that adds defaults, and conditions without effect, to the texts."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        no_effect_when = getattr(action, NO_EFFECT_WHEN, "")
        if no_effect_when:
            text = f"{text}; without effect: {no_effect_when}"
        has_no_default = action.default in (None, False, argparse.SUPPRESS) or action.default == []
        return text if has_no_default else f"{text} (default: %(default)s)"


class _HelpAll(argparse.Action):
    """Action of ``--help_all``: print all flags and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **kwargs)
        self.default = argparse.SUPPRESS

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class FlagValues(Mapping[str, Any]):
    """Values of a script's flags by name, and which of them were given; never changed.

    :meth:`Parser.parse_flags` makes it, and all below the parser read it.

    Args:
        values: Values by the name of the flag; None: there are no flags.
        defaults: Those of the parser.
    """

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = dict(values or {})
        self._defaults = defaults or {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def given(self) -> dict[str, Any]:
        """Values that are not the defaults of the parser, by name."""
        return {
            name: value
            for name, value in self.items()
            if name in self._defaults and value != self._defaults[name]
        }

    def replaced(self, **values: object) -> FlagValues:
        """Return the flags with other values of some."""
        return FlagValues({**self._values, **values}, self._defaults)


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
        # argparse takes words of this pattern for values and not for flags. Its own pattern matches
        # single numbers only.
        self._negative_number_matcher = _SIGNED_VALUES

    def format_help(self) -> str:
        """Format the common flags by task, or all flags of a parser that gives no examples."""
        if not self.epilog:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for task in TASKS:
            formatter.start_section(task)
            formatter.add_arguments(a for a in self._actions if getattr(a, TASK, "") == task)
            formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text("--help_all lists all flags")
        return formatter.format_help()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parse as argparse does, after dashes inside flag names became underscores.

        Values of a file of settings take the place of the defaults.
        """
        words = [self._underscored(word) for word in (sys.argv[1:] if args is None else args)]
        words = self._with_scene_flags(words)
        self._print_completed_flags(words)
        parsed, extra = super().parse_known_args(words, namespace)
        file = getattr(parsed, "config_file", None)
        if file is None:
            return parsed, extra
        given_names = self._given_names(words)
        settings = read_config(file)
        values = {name: value for name, value in settings.items() if name not in given_names}
        # What is in the namespace before the words are parsed takes the place of the defaults.
        parsed, extra = super().parse_known_args(words, self.with_values(values, file))
        delattr(parsed, "config_file")
        return parsed, extra

    def _given_names(self, words: Sequence[str]) -> set[str]:
        """Names of the flags that words give."""
        unset = object()
        defaults = argparse.Namespace(**{action.dest: unset for action in self._actions})
        parsed = super().parse_known_args(words, defaults)[0]
        return {name for name, value in vars(parsed).items() if value is not unset}

    def with_values(
        self, values: Mapping[str, object], file: Path | None = None
    ) -> argparse.Namespace:
        """Check and convert values by names of flags, as on the command line.

        Args:
            values: Numbers, strings, booleans and lists of these.
            file: The file that they are from; None for the arguments of a function.

        Raises:
            UserError: A name is no flag, or a value does not fit.
        """
        namespace = argparse.Namespace()
        actions = {action.dest: action for action in self._actions if action.option_strings}
        for name in ("help", argparse.SUPPRESS, "config_file"):
            actions.pop(name, None)
        for name, value in values.items():
            place = "" if file is None else f"{file}, line {_line_of(name, file)}: "
            action = actions.get(name.replace("-", "_"))
            if action is None:
                raise UserError(f"{place}unknown setting {name}; {_nearest(name, actions)}")
            try:
                self._store(action, value, namespace)
            except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
                reason = getattr(error, "message", None) or error
                raise UserError(f"{place}{name}: {reason}") from None
        return namespace

    def _store(self, action: argparse.Action, value: object, namespace: argparse.Namespace) -> None:
        """Let an action check a value and store it in a namespace."""
        items = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, list | tuple | Mapping) for item in items):
            raise argparse.ArgumentTypeError(
                "neither a number, a string, true or false, nor a list"
            )
        if action.nargs == 0:
            setattr(namespace, action.dest, boolean(str(value)))
            return
        words = [str(item) for item in items]
        if isinstance(action, Repeated):
            # Each item as if the flag was given anew.
            parts = [[word] for word in words]
        elif action.nargs is None:
            parts = [[_one_word(words)]]
        else:
            parts = [words]
        for part in parts:
            if self._match_argument(action, "A" * len(part)) != len(part):
                raise argparse.ArgumentError(action, f"takes other than {len(part)} values")
            action(self, namespace, self._get_values(action, part), action.option_strings[-1])

    def parse_flags(
        self, words: Sequence[str] | None = None, values: Mapping[str, object] | None = None
    ) -> FlagValues:
        """Parse the flags of a script.

        Args:
            words: Of the command line; None: of this process.
            values: Take the place of defaults, by names of flags; see :meth:`with_values`.
        """
        namespace = None if values is None else self.with_values(values)
        parsed = self.parse_args(words, namespace)
        defaults = {action.dest: action.default for action in self._actions}
        defaults.pop(argparse.SUPPRESS, None)
        return FlagValues(vars(parsed), defaults)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parse as argparse does; an error about an unknown flag names the most similar one."""
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

    def _print_completed_flags(self, words: Sequence[str]) -> None:
        """Print which flags are meant by words that are only the beginning of one."""
        for word in words:
            name = word.split("=", 1)[0]
            if not name.startswith("--") or name == "--" or name in self._option_string_actions:
                continue
            flags = [flag for flag in self._option_string_actions if flag.startswith(name)]
            if len(flags) == 1 and not is_follower():
                print(f"note: {printable(name)} is taken for {flags[0]}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert as argparse does, but ``--flag=--`` is a value, as it is from Python 3.13 on."""
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
        scenes = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        n_scenes = len(scenes)
        if not isinstance(action, Repeated):
            n_scenes = min(n_scenes, 1)
        flags = []
        for scene in words[:n_scenes]:
            flags += ["-s", scene]
        return flags + words[n_scenes:]

    def _underscored(self, word: str) -> str:
        """Replace dashes inside the name of a flag that exists with underscores only."""
        if not word.startswith("--") or word == "--":
            return word
        name, equals, value = word[2:].partition("=")
        if f"--{name}" in self._option_string_actions:
            return word
        return f"--{name.replace('-', '_')}{equals}{value}"


def _one_word(words: list[str]) -> str:
    """Join the items of a list as the flag's value has them, those with a comma in quotes."""
    if len(words) > 1:
        words = [f'"{word}"' if "," in word else word for word in words]
    return ",".join(words)


def _nearest(name: str, flags: Iterable[str]) -> str:
    """Advice about an unknown flag: the most similar one, if there is one."""
    similar = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean {similar[0]}?" if similar else "--help_all lists all flags"


def read_config(path: Path) -> dict[str, object]:
    """Read the values of a file of settings, by name.

    Raises:
        UserError: It cannot be read, or is no TOML.
    """
    # Here and not above: without such a file, commands start sooner.
    from sugar_utils.files import decoded, require_regular_file

    if not path.is_dir():
        require_regular_file(path, missing_ok=True)
    advice = "give a TOML file, name = value"
    with explained(f"--config {path}:", advice, OSError, ValueError, RecursionError):
        text = decoded(path.read_bytes())
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"--config {path}: {error}; {_toml_advice(text, error)}") from error
    for name, value in values.items():
        # "C:\temp" is valid, and has a tab in it.
        if isinstance(value, str) and printable(value) != value:
            raise UserError(f"--config {path}: {name} is {value!r}; {_WINDOWS_PATHS}")
    return values


def _toml_advice(text: str, error: ValueError) -> str:
    """Return how to fix the line of a text that is no TOML."""
    place = re.search(r"at line (\d+)", str(error))
    lines = text.splitlines()
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    if '"' in line and "\\" in line:
        return _WINDOWS_PATHS
    if re.match(r"[^=#]+=\s*[A-Za-z/.\\]", line):
        return "text stands in '...', true and false are written small"
    return "give a TOML file, name = value"


def config_text(values: Mapping[str, object], comment: str) -> str:
    """Text of a file of settings, for :func:`read_config`; values that are None are left out."""
    lines = [f"# {comment}"]
    for name, value in values.items():
        if value is not None:
            text = json.dumps(value, ensure_ascii=False, default=str)
            lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def _line_of(name: str, file: Path) -> int | str:
    """Number of the line that gives a name its value, or opens a table of that name."""
    from sugar_utils.files import decoded

    pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[].=]""")
    lines = decoded(file.read_bytes()).splitlines()
    for number, line in enumerate(lines, start=1):
        if pattern.match(line):
            return number
    return "?"
