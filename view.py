# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: ``python view.py RESULT ...``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("view.py", __doc__)

if __name__ == "__main__":
    run_script(main)
