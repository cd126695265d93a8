# SPDX-License-Identifier: Apache-2.0
"""Pictures or a video of results: ``python render.py RESULT ... -s SCENE``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("render.py", __doc__)

if __name__ == "__main__":
    run_script(main)
