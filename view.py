# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: ``python view.py RESULT ...``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and serve the page until Ctrl-C."""
    from sugar_pipeline.viewing.view_run import view, view_options, view_parser

    view(view_options(view_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
