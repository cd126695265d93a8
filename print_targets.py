# SPDX-License-Identifier: Apache-2.0
"""Numbered targets to print, for the scale of a capture: ``python print_targets.py NAME.pdf``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("print_targets.py", __doc__)

if __name__ == "__main__":
    run_script(main)
