# SPDX-License-Identifier: Apache-2.0
"""Train the coarse SuGaR stage alone, with the density regularisation."""

from sugar_pipeline.command_line import script

main = script("train_coarse_density.py", __doc__, __name__)
