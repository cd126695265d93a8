# SPDX-License-Identifier: Apache-2.0
"""Refine a coarse mesh and the Gaussians bound to it."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("train_refined.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
