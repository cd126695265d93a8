# SPDX-License-Identifier: Apache-2.0
"""Extract a mesh: ``python extract_mesh.py -s SCENE -c CHECKPOINT -m COARSE.pt``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("extract_mesh.py", __doc__)

if __name__ == "__main__":
    run_script(main)
