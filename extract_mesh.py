# SPDX-License-Identifier: Apache-2.0
"""Extract a mesh: ``python extract_mesh.py -s SCENE -c CHECKPOINT -m COARSE.pt``."""

from __future__ import annotations

import sys

from sugar_utils.frame import run_main


def main() -> None:
    """Parse the flags and extract."""
    from sugar_extractors.mesh.extraction import extract_coarse_mesh
    from sugar_extractors.mesh.mesh_config import mesh_options

    extract_coarse_mesh(mesh_options(__doc__))


if __name__ == "__main__":
    sys.exit(run_main(main))
