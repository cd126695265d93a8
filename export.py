# SPDX-License-Identifier: Apache-2.0
"""A result in the format of another program: ``python export.py RESULT --to FORMAT``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("export.py", __doc__)

if __name__ == "__main__":
    run_script(main)
