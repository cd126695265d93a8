# SPDX-License-Identifier: Apache-2.0
"""Train vanilla 3D Gaussian splatting: ``python gaussian_splatting/train.py -s SCENE -m OUT``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_pipeline.command_line import script

main = script("gaussian_splatting/train.py", __doc__, __name__)
