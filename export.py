# SPDX-License-Identifier: Apache-2.0
"""A result in the format of another program: ``python export.py RESULT --to FORMAT``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("export.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
