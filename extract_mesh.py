# SPDX-License-Identifier: Apache-2.0
"""Extract a mesh: ``python extract_mesh.py -s SCENE -c CHECKPOINT -m COARSE.pt``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("extract_mesh.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
