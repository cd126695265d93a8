# SPDX-License-Identifier: Apache-2.0
"""A laser scan in the world of a capture: ``python place_scan.py SCAN.las -s SCENE --gcp FILE``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("place_scan.py", __doc__)

if __name__ == "__main__":
    run_script(main)
