# SPDX-License-Identifier: Apache-2.0
"""Refine a coarse mesh and the Gaussians bound to it."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("train_refined.py", __doc__)

if __name__ == "__main__":
    run_script(main)
