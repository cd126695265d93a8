# SPDX-License-Identifier: Apache-2.0
"""Train SuGaR: ``python train.py -s SCENE -c CHECKPOINT -r dn_consistency``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and run the stages."""
    from sugar_pipeline.commands import run_train
    from sugar_pipeline.pipeline_flags import train_parser

    run_train(train_parser(__doc__).parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
