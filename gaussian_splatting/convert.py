# SPDX-License-Identifier: Apache-2.0
"""Find the cameras of photographs or a video: ``python gaussian_splatting/convert.py -s SCENE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_pipeline.command_line import main_of, run_script

main = main_of("gaussian_splatting/convert.py", __doc__)

if __name__ == "__main__":
    run_script(main)
