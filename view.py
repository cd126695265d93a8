# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: ``python view.py RESULT ...``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and serve the page until Ctrl-C."""
    from sugar_pipeline.view_run import ViewOptions, view
    from sugar_utils.settings import parse

    view(parse(ViewOptions, __doc__))


if __name__ == "__main__":
    sys.exit(run_main(main))
