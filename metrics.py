# SPDX-License-Identifier: Apache-2.0
"""Measure refined models on held-out views: ``python metrics.py --scene_config FILE -r MODE``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and measure."""
    from sugar_pipeline.model_metrics import measure, metrics_options, metrics_parser

    measure(metrics_options(metrics_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
