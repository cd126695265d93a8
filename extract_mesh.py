# SPDX-License-Identifier: Apache-2.0
"""Extract a mesh: ``python extract_mesh.py -s SCENE -c CHECKPOINT -m COARSE.pt``."""

from sugar_pipeline.command_line import script

main = script("extract_mesh.py", __doc__, __name__)
