# SPDX-License-Identifier: Apache-2.0
"""Measure refined models on held-out views: ``python metrics.py --scene_config FILE -r MODE``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("metrics.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
