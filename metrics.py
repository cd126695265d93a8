# SPDX-License-Identifier: Apache-2.0
"""Measure refined models on held-out views: ``python metrics.py --scene_config FILE -r MODE``."""

from sugar_pipeline.command_line import script

main = script("metrics.py", __doc__, __name__)
