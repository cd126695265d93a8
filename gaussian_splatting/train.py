# SPDX-License-Identifier: Apache-2.0
"""Train vanilla 3D Gaussian splatting: ``python gaussian_splatting/train.py -s SCENE -m OUT``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_utils.flags import HelpFormatter, Parser
from sugar_utils.frame import run_main


def parser() -> argparse.ArgumentParser:
    """All flags of the vanilla trainer."""
    from gaussian_splatting.vanilla.vanilla_options import add_vanilla_flags

    result = Parser(description=__doc__, formatter_class=HelpFormatter)
    add_vanilla_flags(result)
    return result


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.vanilla.vanilla_options import vanilla_options
    from gaussian_splatting.vanilla.vanilla_run import train_vanilla

    train_vanilla(vanilla_options(parser().parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
