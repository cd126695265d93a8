# SPDX-License-Identifier: Apache-2.0
"""Tables of flags in DOCS/FLAGS.md, generated from the help of the parsers.

``python -m tests.support.flag_tables`` writes them anew. A table stands below a line such as
``<!-- flags of train.py: input, image size -->``, which names a script, or a verb of ``sugar`` that
has none, and headings of its ``--help``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sugar_pipeline.command_line import PROGRAMS

DOCUMENT = Path(__file__).resolve().parents[2] / "DOCS" / "FLAGS.md"
MARKER = re.compile(r"^<!-- flags of (\S+): (.+) -->$")
WHEN_UNSET = re.compile(r"(?:^|; )unset: (.+)$")


def parser_for(program: str) -> argparse.ArgumentParser:
    """Return the parser of a script, or of a verb that has none."""
    return PROGRAMS[program].make_parser(None)


def flag_rows(parser: argparse.ArgumentParser, *titles: str) -> list[str]:
    """The flags below some headings of ``--help`` as rows of a Markdown table.

    The value of an unset flag is its default; choices are listed unless the meaning names all.
    When a flag has no effect is left to ``--help_all``.

    Raises:
        ValueError: The parser has no such heading.
    """
    groups = {group.title: group for group in parser._action_groups}
    unknown = [title for title in titles if title not in groups]
    if unknown:
        raise ValueError(f"no heading {unknown[0]!r}; there are {', '.join(map(str, groups))}")
    return [_row(action) for title in titles for action in groups[title]._group_actions]


def _row(action: argparse.Action) -> str:
    default, text, rest = _default_text(action), _quoted(action.help or ""), ""
    choices = [str(choice) for choice in action.choices or ()]
    if not set(re.findall(r"\w+", text)).issuperset(choices):
        rest = f" ({', '.join(f'`{choice}`' for choice in choices)})"
    when_unset = WHEN_UNSET.search(text) if default == "–" else None
    if when_unset:
        default, text = when_unset[1], text[: when_unset.start()]
    return f"| `{', '.join(action.option_strings or [action.dest])}` | {default} | {text}{rest} |"


def _default_text(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "off"
    if action.default is None:
        return "–"
    if isinstance(action.default, list | tuple):
        return " ".join(map(str, action.default)) or "none"
    return str(action.default)


def _quoted(text: str) -> str:
    """A help text as Markdown: names of flags are code."""
    text = text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`/-])(--?[a-z]\w*)", r"`\1`", text)


def with_tables(text: str) -> str:
    """A document with all its tables of flags as the parsers have them now.

    A row that stands in an earlier table is not repeated.
    """
    lines: list[str] = []
    seen: set[str] = set()
    in_table = False
    for line in text.splitlines():
        in_table = in_table and line.startswith("|")
        if not in_table:
            lines.append(line)
        marker = MARKER.match(line)
        if marker:
            rows = flag_rows(parser_for(marker[1]), *marker[2].split(", "))
            lines += ["| flag | default | meaning |", "|---|---|---|"]
            lines += [row for row in rows if row not in seen]
            seen |= set(rows)
            in_table = True
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
