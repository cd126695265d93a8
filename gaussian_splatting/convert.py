# SPDX-License-Identifier: Apache-2.0
"""Find the cameras of photographs or a video: ``python gaussian_splatting/convert.py -s SCENE``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and find the cameras."""
    from gaussian_splatting.sfm.convert_options import convert_options, convert_parser
    from gaussian_splatting.sfm.convert_run import convert

    convert(convert_options(convert_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
