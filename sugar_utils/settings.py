# SPDX-License-Identifier: Apache-2.0
"""Settings declared once: a dataclass field is a flag, its documentation and its value.

``sh_degree: int = flag(3, "highest degree of the colour", group="vanilla stage")`` is
``--sh_degree`` on the command line, ``settings.sh_degree`` in the code, and a row of the tables in
DOCS/TRAINING.md. :func:`add_flags` puts the fields of a dataclass, and of dataclasses in it, in
a parser; :func:`from_args` makes the dataclass of what was parsed. A dataclass that needs more
than its fields has a class method ``from_flags``, which gets the given ones as keywords.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.flags import HelpFormatter, IntList, Parser, boolean, config_text, integer

SETTINGS_FILE = "settings.toml"
_KEY = "flag"
_SOURCE = "source"
MODE_FLAGS = ("preset", "regularization_type")
"""Flags whose value decides what other flags are where they are not given. The script may set them,
so a field of such a name need not be a flag."""

Settings = TypeVar("Settings")

_PARSERS: dict[type, Callable[[str], Any]] = {bool: boolean, int: integer, float: float}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What a field says about its flag; see :func:`flag`."""

    name: str = ""
    default: Any
    help: str  # what it means, for ``--help`` and for the documents
    group: str  # heading above it in both
    short: str | None = None  # one-letter form
    long: str = ""  # its form where that is not the name of the field
    parse: Callable[[str], Any] | None  # checks and converts the text
    no_effect_when: str = ""
    missing: str = ""  # advice where it must be given and is not
    positional: bool = False  # given by its place, without the name of a flag
    # Heading in ``--help``, of :data:`~sugar_utils.flags.TASKS`; else only ``--help_all`` shows it.
    task: str = ""
    # Value by the name of a preset or mode that is chosen, where the flag is not given.
    modes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any]  # further keywords of ``add_argument``

    @property
    def spellings(self) -> list[str]:
        """The flag as it is typed, the short form first; the bare name of what has no flag."""
        if self.positional:
            return [self.name]
        return [*([self.short] if self.short else []), self.long or f"--{self.name}"]

    def arguments(self) -> dict[str, Any]:
        words: dict[str, Any] = {"dest": self.name, "default": self.default, "help": self.help}
        if self.positional:
            return {"help": self.help, "type": self.parse, **self.options}
        if isinstance(self.default, tuple) and self.parse is None:
            words |= {"action": IntList, "default": list(self.default)}
        elif self.options.get("action") != "store_true":
            words["type"] = self.parse
        return words | self.options


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    parse: Callable[[str], Any] | None = None,
    unset: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field that is a flag named like the field.

    Args:
        default: Value of the field where the flag is not given; ``MISSING`` where it must be. A
            tuple is a list of whole numbers.
        parse: Unset: by the type of the default.
        unset: The parser says None where the flag is not given, and the field keeps its default.
            Flags with ``modes`` are such.
        more: Further fields of :class:`Flag`, or keywords of ``add_argument``.
    """
    shown = None if unset or "modes" in more or default is MISSING else default
    if parse is None and not isinstance(default, tuple):
        parse = _PARSERS.get(type(default), str)
    own = {name: more.pop(name) for name in Flag.__dataclass_fields__ if name in more}
    declared = Flag(default=shown, help=help, group=group, parse=parse, options=more, **own)
    return dataclasses.field(default=default, metadata={_KEY: declared})


def without_flags(cls: type) -> Any:
    """A field of a dataclass whose fields are flags elsewhere and not here."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: None})


def made_of(source: type, default: Callable[[], Any]) -> Any:
    """A field whose value ``source.from_flags`` makes of the flags of ``source``."""
    return dataclasses.field(default_factory=default, metadata={_SOURCE: source})


@functools.cache
def _types_of(cls: type) -> dict[str, Any]:
    """Types of the fields of a dataclass; to evaluate them takes longer than all else here."""
    return typing.get_type_hints(cls)


def _nested(field: dataclasses.Field, hints: dict[str, Any]) -> type | None:
    """The dataclass whose flags stand for a field that is no flag; None if there are none."""
    nested = field.metadata.get(_SOURCE, hints[field.name])
    looked_into = _KEY not in field.metadata and dataclasses.is_dataclass(nested)
    return nested if looked_into and next(flags_of(nested), None) is not None else None


def flags_of(cls: type, *groups: str) -> Iterator[Flag]:
    """Flags of a dataclass and of the dataclasses in it, in the order of their fields.

    Only those under the given headings; all if none is named.
    """
    hints = _types_of(cls)
    for field in dataclasses.fields(cls):
        declared = field.metadata.get(_KEY)
        if declared is None:
            if (nested := _nested(field, hints)) is not None:
                yield from flags_of(nested, *groups)
        elif not groups or declared.group in groups:
            yield dataclasses.replace(declared, name=field.name)


def parser_of(
    description: str | None, *settings: type, examples: str = "", **changes: dict[str, Any]
) -> Parser:
    """A parser of all flags of some dataclasses.

    Args:
        examples: Last lines of ``--help``, which then shows only flags that have a task.
        changes: See :func:`add_flags`.
    """
    parser = Parser(description=description, epilog=examples, formatter_class=HelpFormatter)
    for cls in settings:
        add_flags(parser, cls, **changes)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, cls: type, *groups: str, **changes: dict[str, Any]
) -> None:
    """Put flags into a parser; those that it has already stay as they are.

    Args:
        groups: Headings whose flags are wanted; all if none is named.
        changes: What a script declares otherwise, by name of the flag: fields of :class:`Flag`.
    """
    present = {action.dest for action in parser._actions}
    headings = {group.title: group for group in parser._action_groups}
    for declared in flags_of(cls, *groups):
        if declared.name in present:
            continue
        declared = dataclasses.replace(declared, **changes.get(declared.name, {}))
        present.add(declared.name)
        title = declared.group
        if title not in headings:
            headings[title] = parser.add_argument_group(title)
        action = headings[title].add_argument(*declared.spellings, **declared.arguments())
        # type: ignore[attr-defined]
        action.no_effect_when = declared.no_effect_when
        action.task = declared.task


def from_args(cls: type[Settings], args: argparse.Namespace, **given: Any) -> Settings:
    """The settings that were parsed.

    A flag that the script does not have leaves its field alone, and so do fields that are neither
    flags nor dataclasses of such. ``given`` are fields that follow from something else.
    """
    hints = _types_of(cls)
    values = dict(given)
    nested = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        declared = field.metadata.get(_KEY)
        if field.name in values:
            continue
        if declared is None and field.name not in MODE_FLAGS:
            nested[field.name] = _nested(field, hints)
            continue
        value = getattr(args, field.name, None)
        if value is None and declared is not None:
            # What the preset or the mode that was chosen makes of it.
            chosen = (getattr(args, name, None) for name in MODE_FLAGS)
            value = next((declared.modes[mode] for mode in chosen if mode in declared.modes), None)
        if value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING:
            require_given(args, cls, field.name)
    # A flag that is missing is told before the device is looked for.
    values |= {name: from_args(of, args) for name, of in nested.items() if of is not None}
    return getattr(cls, "from_flags", cls)(**values)


def require_given(args: argparse.Namespace, cls: type, *names: str) -> None:
    declared = {one.name: one for one in flags_of(cls)}
    for name in names:
        if getattr(args, name, None) is None:
            spelled = "/".join(declared[name].spellings)
            advice = declared[name].missing or "--help_all lists all flags"
            raise UserError(f"{spelled} is missing; {advice}")


def with_flags(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """What was parsed, with other values of some flags."""
    return argparse.Namespace(**{**vars(args), **values})


def given_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Values that are not the defaults of a parser, by name."""
    unset = [action for action in parser._actions if action.dest != argparse.SUPPRESS]
    defaults = {action.dest: action.default for action in unset}
    return {k: v for k, v in vars(args).items() if k in defaults and v != defaults[k]}


def write_settings(folder: Path, given: Mapping[str, Any]) -> None:
    """Write ``settings.toml``, which repeats a run: the flags that were given."""
    text = config_text(given, "--config with this file repeats the run")
    path = folder / SETTINGS_FILE
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
