# SPDX-License-Identifier: Apache-2.0
"""Train the coarse stage alone, in multi-view mode."""

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and train."""
    from gaussian_splatting.engine.runner import run_stage
    from sugar_trainers.multiview_stage import multiview_options, multiview_parser

    args = multiview_parser(__doc__).parse_args()
    run_stage(multiview_options(args, args.output_dir))


if __name__ == "__main__":
    sys.exit(run_main(main))
