# SPDX-License-Identifier: Apache-2.0
"""Settings declared once: a dataclass field is a flag, its documentation and its value.

``sh_degree: int = flag(3, "highest degree of the colour", group="vanilla stage")`` is
``--sh_degree`` on the command line, ``settings.sh_degree`` in the code, and a row of the tables in
DOCS/FLAGS.md. :func:`add_flags` puts the fields of a dataclass, and of dataclasses in it, in
a parser; :func:`from_args` makes the dataclass from the parsed flags. A dataclass that needs more
than its fields has a class method ``from_flags``, which gets the given ones as keywords.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.flags import (
    NO_EFFECT_WHEN,
    TASK,
    FlagValues,
    HelpFormatter,
    IntList,
    Parser,
    boolean,
    config_text,
    integer,
    read_config,
)

SETTINGS_FILE = "settings.toml"
_NOT_OF_RESULTS = ("force", "overwrite", "output_dir", "resume", "stop_after", "verbose", "viewer")
"""Flags that say where and how a run runs, and not what it makes."""

_KEY = "flag"
_SOURCE = "source"
MODE_FLAGS = ("preset", "regularization_type")
"""Flags whose value decides the values of other flags that are not given. The script may set them,
so a field of such a name need not be a flag."""

Settings = TypeVar("Settings")

_PARSERS: dict[type, Callable[[str], object]] = {bool: boolean, int: integer, float: float}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Declaration of a flag in the metadata of a field; made by :func:`flag`."""

    name: str = ""  # of the field
    default: object  # of the parser
    help: str  # what it means, for ``--help`` and for the documents
    group: str  # heading above it in both
    short: str | None = None  # one-letter form
    long: str = ""  # its form where that is not the name of the field
    parse: Callable[[str], object] | None  # checks and converts the text
    no_effect_when: str = ""
    missing: str = ""  # advice where it is required and missing
    positional: bool = False  # given by its position, without the name of a flag
    # Heading in ``--help``, of :data:`~sugar_utils.flags.TASKS`; else only ``--help_all`` shows it.
    task: str = ""
    # Value by the name of a preset or mode that is chosen, where the flag is not given.
    modes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    options: dict[str, Any]  # further keywords of ``add_argument``

    @property
    def spellings(self) -> list[str]:
        """The flag as it is typed, the short form first; the bare name if it is positional."""
        if self.positional:
            return [self.name]
        long = self.long or f"--{self.name}"
        return [long] if self.short is None else [self.short, long]

    def arguments(self) -> dict[str, Any]:
        """Keywords of ``add_argument``."""
        if self.positional:
            return {"help": self.help, "type": self.parse, **self.options}
        keywords: dict[str, Any] = {"dest": self.name, "default": self.default, "help": self.help}
        if isinstance(self.default, tuple) and self.parse is None:
            keywords["action"] = IntList
            keywords["default"] = list(self.default)
        elif self.options.get("action") != "store_true":
            keywords["type"] = self.parse
        keywords.update(self.options)
        return keywords


_FLAG_FIELDS = frozenset(Flag.__dataclass_fields__)


def flag(
    default: object,
    help: str,
    *,
    group: str,
    parse: Callable[[str], object] | None = None,
    unset: bool = False,
    **more: Any,
) -> Any:
    """Declare a dataclass field that is a flag named like the field.

    Args:
        default: Value of the field where the flag is not given; ``MISSING`` where it must be. A
            tuple is a list of whole numbers.
        help: Its text in ``--help`` and in the documents.
        group: Heading above it in both.
        parse: Checks and converts the text; if None, by the type of the default.
        unset: The parser's default is None, and the field's default replaces it. Flags with
            ``modes`` are such.
        more: Further fields of :class:`Flag`, or keywords of ``add_argument``.
    """
    has_no_default = unset or "modes" in more or default is MISSING
    if parse is None and not isinstance(default, tuple):
        parse = _PARSERS.get(type(default), str)
    flag_fields = {name: more.pop(name) for name in _FLAG_FIELDS if name in more}
    declaration = Flag(
        default=None if has_no_default else default,
        help=help,
        group=group,
        parse=parse,
        options=more,
        **flag_fields,
    )
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def without_flags(cls: type) -> Any:
    """Declare a field without flags here; its dataclass has flags elsewhere."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: None})


def made_of(source: type, default: Callable[[], object]) -> Any:
    """Declare a field with the value of ``source.from_flags`` from the flags of ``source``."""
    return dataclasses.field(default_factory=default, metadata={_SOURCE: source})


@functools.cache
def _types_of(cls: type) -> dict[str, object]:
    """Types of the fields of a dataclass; cached, because their evaluation is slow."""
    return typing.get_type_hints(cls)


def _nested(field: dataclasses.Field[object], types: dict[str, object]) -> type | None:
    """The dataclass with the flags of a field that is no flag itself; None if there are none."""
    if _KEY in field.metadata:
        return None
    source = field.metadata.get(_SOURCE, types[field.name])
    if not isinstance(source, type) or not dataclasses.is_dataclass(source):
        return None
    has_flags = any(True for _ in flags_of(source))
    return source if has_flags else None


def flags_of(cls: type, *groups: str) -> Iterator[Flag]:
    """Yield flags of a dataclass and of the dataclasses in it, in the order of their fields.

    Only those under the given headings; all if none is named.
    """
    types = _types_of(cls)
    for field in dataclasses.fields(cls):
        declaration = field.metadata.get(_KEY)
        if declaration is None:
            nested = _nested(field, types)
            if nested is not None:
                yield from flags_of(nested, *groups)
        elif not groups or declaration.group in groups:
            yield dataclasses.replace(declaration, name=field.name)


def parser_of(
    description: str | None, *settings: type, examples: str = "", **changes: Mapping[str, object]
) -> Parser:
    """Make a parser of all flags of some dataclasses.

    Args:
        description: First line of ``--help``.
        settings: The dataclasses.
        examples: Last lines of ``--help``, which then shows only flags that have a task.
        changes: See :func:`add_flags`.
    """
    parser = Parser(description=description, epilog=examples, formatter_class=HelpFormatter)
    for cls in settings:
        add_flags(parser, cls, **changes)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, cls: type, *groups: str, **changes: Mapping[str, object]
) -> None:
    """Add flags to a parser; existing ones stay unchanged.

    Args:
        parser: Gets the flags, under their headings.
        cls: Dataclass with the flags.
        groups: Headings whose flags are added; all if none is named.
        changes: What a script declares otherwise, by name of the flag: fields of :class:`Flag`.
    """
    present = {action.dest for action in parser._actions}
    headings = {heading.title: heading for heading in parser._action_groups}
    for declaration in flags_of(cls, *groups):
        name = declaration.name
        if name in present:
            continue
        declaration = dataclasses.replace(declaration, **changes.get(name, {}))
        present.add(name)
        title = declaration.group
        if title not in headings:
            headings[title] = parser.add_argument_group(title)
        action = headings[title].add_argument(*declaration.spellings, **declaration.arguments())
        setattr(action, NO_EFFECT_WHEN, declaration.no_effect_when)
        setattr(action, TASK, declaration.task)


def from_args(cls: type[Settings], flags: FlagValues, **given: object) -> Settings:
    """Make the settings of parsed flags.

    A flag that the script does not have leaves its field at the default, and so do fields that are
    neither flags nor dataclasses of such.

    Args:
        cls: Dataclass of the settings.
        flags: The parsed flags.
        given: Values of fields that are not read from the flags.

    Raises:
        UserError: A flag without a default is missing.
    """
    types = _types_of(cls)
    values = dict(given)
    nested_fields = []
    for field in _fields_of(cls):
        if field.name in values:
            continue
        declaration: Flag | None = field.metadata.get(_KEY)
        if declaration is None and field.name not in MODE_FLAGS:
            nested_fields.append(field)
            continue
        value = flags.get(field.name)
        if value is None and declaration is not None:
            value = _value_of_mode(declaration, flags)
        if value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING:
            require_given(flags, cls, field.name)
    # A missing flag is reported before a nested dataclass looks for the device.
    for field in nested_fields:
        nested = _nested(field, types)
        if nested is not None:
            values[field.name] = from_args(nested, flags)
    make = getattr(cls, "from_flags", cls)
    return make(**values)


def _fields_of(cls: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(cls)


def _value_of_mode(declaration: Flag, flags: FlagValues) -> object:
    """Value of a flag that is not given, in the preset or mode that was chosen."""
    for name in MODE_FLAGS:
        mode = flags.get(name)
        if mode is not None and mode in declaration.modes:
            return declaration.modes[mode]
    return None


def require_given(flags: FlagValues, cls: type, *names: str) -> None:
    """Check that flags of a dataclass have values.

    Raises:
        UserError: One has none.
    """
    declarations = {declaration.name: declaration for declaration in flags_of(cls)}
    for name in names:
        if flags.get(name) is None:
            spellings = "/".join(declarations[name].spellings)
            advice = declarations[name].missing or "--help_all lists all flags"
            raise UserError(f"{spellings} is missing; {advice}")


def changed_flags(folder: Path, flags: Mapping[str, object]) -> list[str]:
    """Return ``--schedule_scale 0.05 -> 0.06`` for each flag that ``settings.toml`` has otherwise.

    Args:
        folder: Of the file; nothing has changed where there is none that can be read.
        flags: Values by name.
    """
    path = folder / SETTINGS_FILE
    earlier: dict[str, object] = {}
    if path.is_file():
        with contextlib.suppress(UserError):
            earlier = read_config(path)
    if not earlier and not path.is_file():
        return []
    lines = []
    for name in dict.fromkeys([*earlier, *flags]):
        old, new = (_flag_text(values.get(name)) for values in (earlier, flags))
        if old != new and name not in _NOT_OF_RESULTS:
            lines.append(f"--{name} {old} -> {new}")
    return lines


def _flag_text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def write_settings(folder: Path, flags: Mapping[str, object]) -> None:
    """Write ``settings.toml``, which repeats a run: values of its flags, by name."""
    text = config_text(flags, "--config with this file repeats the run")
    path = folder / SETTINGS_FILE
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
