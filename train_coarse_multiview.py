# SPDX-License-Identifier: Apache-2.0
"""Train the coarse stage alone, in multi-view mode."""

from sugar_pipeline.command_line import script

main = script("train_coarse_multiview.py", __doc__, __name__)
