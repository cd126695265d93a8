# SPDX-License-Identifier: Apache-2.0
"""Train the coarse stage alone, in multi-view mode."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("train_coarse_multiview.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
