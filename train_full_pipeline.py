# SPDX-License-Identifier: Apache-2.0
"""Photographs to textured mesh: ``python train_full_pipeline.py -s SCENE``."""

from sugar_pipeline.command_line import script

main = script("train_full_pipeline.py", __doc__, __name__)
