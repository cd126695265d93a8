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

from gaussian_splatting.posing.convert_options import convert_parser
from gaussian_splatting.vanilla.vanilla_options import vanilla_parser
from sugar_extractors.export.export_options import export_parser
from sugar_extractors.mesh.mesh_options import mesh_parser
from sugar_extractors.texture.texture_options import texture_parser
from sugar_pipeline.filming.film_options import film_parser
from sugar_pipeline.metrics_options import metrics_parser
from sugar_pipeline.pipeline_flags import full_parser, train_parser
from sugar_pipeline.viewing.view_options import view_parser
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
    "render.py": film_parser,
    "view.py": view_parser,
    "export.py": export_parser,
    "gaussian_splatting/train.py": vanilla_parser,
    "gaussian_splatting/convert.py": convert_parser,
}
"""Every entry point and what makes its parser."""

MARKER = re.compile(r"^<!-- flags of (\S+): (.+) -->$")


def with_tables(text: str) -> str:
    """A document with all its tables of flags as the parsers have them now."""
    lines: list[str] = []
    in_table = False
    for line in text.splitlines():
        in_table = in_table and line.startswith("|")
        if not in_table:
            lines.append(line)
        marker = MARKER.match(line)
        if marker:
            parser = PARSERS[marker[1]](None)
            lines += flag_table(parser, *marker[2].split(", "))
            in_table = True
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
