# SPDX-License-Identifier: Apache-2.0
"""A result in the format of another program: ``python export.py RESULT --to FORMAT``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and write."""
    from sugar_extractors.export.export_run import ExportOptions, export, export_parser
    from sugar_utils.settings import from_args

    export(from_args(ExportOptions, export_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
