# SPDX-License-Identifier: Apache-2.0
"""Train the coarse SuGaR stage alone, with the density regularisation."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("train_coarse_density.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
