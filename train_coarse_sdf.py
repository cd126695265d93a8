# SPDX-License-Identifier: Apache-2.0
"""Train the coarse SuGaR stage alone, with the sdf regularisation."""

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.engine.runner import run_stage
    from sugar_trainers.coarse_stage import CoarseOptions
    from sugar_utils.settings import parse

    run_stage(parse(CoarseOptions, __doc__, regularization_type="sdf"))


if __name__ == "__main__":
    sys.exit(run_main(main))
