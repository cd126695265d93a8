# SPDX-License-Identifier: Apache-2.0
"""Write a refined model as a textured mesh: ``-s SCENE -c CHECKPOINT -m REFINED.pt``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("extract_refined_mesh_with_texture.py", __doc__)

if __name__ == "__main__":
    run_script(main)
