# SPDX-License-Identifier: Apache-2.0
"""Refine a coarse mesh and the Gaussians bound to it."""

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.engine.runner import run_stage
    from sugar_trainers.refine_stage import RefineOptions
    from sugar_utils.settings import parse

    run_stage(parse(RefineOptions, __doc__))


if __name__ == "__main__":
    sys.exit(run_main(main))
