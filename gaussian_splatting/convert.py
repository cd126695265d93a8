# SPDX-License-Identifier: Apache-2.0
"""Find the cameras of photographs or a video: ``python gaussian_splatting/convert.py -s SCENE``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and find the cameras."""
    from gaussian_splatting.sfm.convert_options import ConvertOptions
    from gaussian_splatting.sfm.convert_run import convert
    from sugar_utils.settings import parse

    convert(parse(ConvertOptions, __doc__))


if __name__ == "__main__":
    sys.exit(run_main(main))
