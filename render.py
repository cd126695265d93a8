# SPDX-License-Identifier: Apache-2.0
"""Pictures or a video of results: ``python render.py RESULT ... -s SCENE``."""

import sys

from sugar_pipeline.command_line import script
from sugar_utils.frame import run_main

main = script("render.py", __doc__)

if __name__ == "__main__":
    sys.exit(run_main(main))
