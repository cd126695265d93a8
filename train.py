# SPDX-License-Identifier: Apache-2.0
"""Train SuGaR: ``python train.py -s SCENE -c CHECKPOINT -r dn_consistency``."""

from __future__ import annotations

import argparse
import sys

from sugar_trainers.pipeline import add_pipeline_flags, run_pipeline
from sugar_utils.flags import HelpFormatter, Parser, run_main


def parser() -> argparse.ArgumentParser:
    """All flags of the pipeline."""
    result = Parser(description=__doc__, formatter_class=HelpFormatter)
    add_pipeline_flags(result)
    return result


def main() -> None:
    """Parse the flags and run the stages."""
    run_pipeline(parser().parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
