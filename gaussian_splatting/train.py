# SPDX-License-Identifier: Apache-2.0
"""Train vanilla 3D Gaussian splatting: ``python gaussian_splatting/train.py -s SCENE -m OUT``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_pipeline.command_line import main_of, run_script

main = main_of("gaussian_splatting/train.py", __doc__)

if __name__ == "__main__":
    run_script(main)
