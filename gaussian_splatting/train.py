# SPDX-License-Identifier: Apache-2.0
"""Train vanilla 3D Gaussian splatting: ``python gaussian_splatting/train.py -s SCENE -m OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.engine.runner import run_stage
    from gaussian_splatting.vanilla.vanilla_run import VanillaOptions, vanilla_parser
    from sugar_utils.settings import from_args

    run_stage(from_args(VanillaOptions, vanilla_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
