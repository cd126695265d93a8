# SPDX-License-Identifier: Apache-2.0
"""Write a refined model as a textured mesh: ``-s SCENE -c CHECKPOINT -m REFINED.pt``."""

from sugar_pipeline.command_line import script

main = script("extract_refined_mesh_with_texture.py", __doc__, __name__)
