# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: ``python view.py RESULT ...``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("view.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
