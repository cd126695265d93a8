# SPDX-License-Identifier: Apache-2.0
"""Train the coarse SuGaR stage alone, with the density regularisation."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("train_coarse_density.py", __doc__)

if __name__ == "__main__":
    run_script(main)
