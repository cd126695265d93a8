# SPDX-License-Identifier: Apache-2.0
"""Pictures or a video of results: ``python render.py RESULT ... -s SCENE``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and render."""
    from sugar_pipeline.render_run import RenderOptions, render_results
    from sugar_utils.settings import parse

    render_results(parse(RenderOptions, __doc__))


if __name__ == "__main__":
    sys.exit(run_main(main))
