# SPDX-License-Identifier: Apache-2.0
"""Write a refined model as a textured mesh: ``-s SCENE -c CHECKPOINT -m REFINED.pt``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("extract_refined_mesh_with_texture.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
