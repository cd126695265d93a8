# SPDX-License-Identifier: Apache-2.0
"""The tables of flags in DOCS/TRAINING.md, made of what the flags say about themselves.

``python -m sugar_pipeline.flag_tables`` writes them anew. A table stands below a line such as
``<!-- flags of train.py: input, image size -->``, which names a script and headings of its
``--help``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from gaussian_splatting.sfm.convert_options import convert_parser
from gaussian_splatting.vanilla.vanilla_run import vanilla_parser
from sugar_extractors.export.export_run import export_parser
from sugar_extractors.mesh.mesh_config import mesh_parser
from sugar_extractors.texture.texturing import texture_parser
from sugar_pipeline.model_metrics import metrics_parser
from sugar_pipeline.pipeline_flags import full_parser, train_parser
from sugar_pipeline.rendering.render_run import render_parser
from sugar_pipeline.viewing.view_run import view_parser
from sugar_trainers.coarse_stage import coarse_parser
from sugar_trainers.multiview_stage import multiview_parser
from sugar_trainers.refine_stage import refine_parser
from sugar_utils.settings import flag_table

DOCUMENT = Path(__file__).resolve().parent.parent / "DOCS" / "TRAINING.md"
PARSERS: dict[str, Callable[[str | None], argparse.ArgumentParser]] = {
    "train.py": train_parser,
    "train_full_pipeline.py": full_parser,
    "train_coarse_density.py": coarse_parser,
    "train_coarse_sdf.py": coarse_parser,
    "train_coarse_multiview.py": multiview_parser,
    "train_refined.py": refine_parser,
    "extract_mesh.py": mesh_parser,
    "extract_refined_mesh_with_texture.py": texture_parser,
    "metrics.py": metrics_parser,
    "render.py": render_parser,
    "view.py": view_parser,
    "export.py": export_parser,
    "gaussian_splatting/train.py": vanilla_parser,
    "gaussian_splatting/convert.py": convert_parser,
}
"""Every entry point and what makes its parser."""

MARKER = re.compile(r"^<!-- flags of (\S+): (.+) -->$")
CHOICES = re.compile(r" \(((?:`[^`]+`(?:, )?)+)\)$")
WHEN_UNSET = re.compile(r"(?:^|; )unset: (.+)$")


def flag_rows(parser: argparse.ArgumentParser, *titles: str) -> list[str]:
    """The flags below some headings of ``--help`` as rows of three columns.

    The value of an unset flag is its default; choices are not listed where the meaning names all.
    """
    rows = []
    for row in flag_table(parser, *titles)[2:]:
        names, default, meaning, no_effect = (cell.strip() for cell in row[2:-1].split(" | "))
        names = names.replace("`, `", ", ")
        choices = CHOICES.search(meaning)
        text = meaning[: choices.start()] if choices else meaning
        named = set(re.findall(r"\w+", text))
        listed = re.findall(r"`([^`]+)`", choices[1]) if choices else []
        rest = "" if named.issuperset(listed) else choices[0]
        when_unset = WHEN_UNSET.search(text) if default == "unset" else None
        if when_unset:
            default, text = when_unset[1], text[: when_unset.start()]
        if no_effect:
            rest += f". *No effect: {no_effect}*"
        rows.append(f"| {names} | {'–' if default == 'unset' else default} | {text}{rest} |")
    return rows


def with_tables(text: str) -> str:
    """A document with all its tables of flags as the parsers have them now.

    A row that stands in an earlier table is not repeated; the last row of the table names it.
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
            rows = flag_rows(PARSERS[marker[1]](None), *marker[2].split(", "))
            lines += ["| flag | default | meaning |", "|---|---|---|"]
            lines += [row for row in rows if row not in seen]
            repeated = [row.split(" | ")[0].removeprefix("| ") for row in rows if row in seen]
            if repeated:
                lines.append(f"| {', '.join(repeated)} | | as above |")
            seen |= set(rows)
            in_table = True
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
