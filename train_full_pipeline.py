# SPDX-License-Identifier: Apache-2.0
"""Photographs to textured mesh: ``python train_full_pipeline.py -s SCENE``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("train_full_pipeline.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
