# SPDX-License-Identifier: Apache-2.0
"""Write a refined model as a textured mesh: ``-s SCENE -c CHECKPOINT -m REFINED.pt``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and extract."""
    from sugar_extractors.texture.texturing import (
        TextureOptions,
        extract_textured_mesh,
        texture_parser,
    )
    from sugar_utils.settings import from_args

    extract_textured_mesh(from_args(TextureOptions, texture_parser(__doc__).parse_args()))


if __name__ == "__main__":
    sys.exit(run_main(main))
