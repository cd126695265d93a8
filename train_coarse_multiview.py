# SPDX-License-Identifier: Apache-2.0
"""Train the coarse stage alone, in multi-view mode."""

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.engine.runner import run_stage
    from sugar_trainers.multiview_stage import MultiviewOptions
    from sugar_utils.settings import parse

    run_stage(parse(MultiviewOptions, __doc__, regularization_type="multiview"))


if __name__ == "__main__":
    sys.exit(run_main(main))
