# SPDX-License-Identifier: Apache-2.0
"""Photographs to textured mesh: ``python train_full_pipeline.py -s SCENE``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("train_full_pipeline.py", __doc__)

if __name__ == "__main__":
    run_script(main)
