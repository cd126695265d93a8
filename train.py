# SPDX-License-Identifier: Apache-2.0
"""Train SuGaR: ``python train.py -s SCENE -c CHECKPOINT -r dn_consistency``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("train.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
