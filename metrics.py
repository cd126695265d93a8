# SPDX-License-Identifier: Apache-2.0
"""Measure refined models on held-out views: ``python metrics.py --scene_config FILE -r MODE``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("metrics.py", __doc__)

if __name__ == "__main__":
    run_script(main)
