# SPDX-License-Identifier: Apache-2.0
"""Refine a coarse mesh and the Gaussians bound to it."""

from sugar_pipeline.command_line import script

main = script("train_refined.py", __doc__, __name__)
