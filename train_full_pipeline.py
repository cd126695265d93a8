# SPDX-License-Identifier: Apache-2.0
"""Photographs to textured mesh: ``python train_full_pipeline.py -s SCENE``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and run all stages, the vanilla one included."""
    from sugar_pipeline.commands import run_full
    from sugar_pipeline.pipeline_flags import full_parser

    run_full(full_parser(__doc__).parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
