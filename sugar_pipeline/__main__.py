# SPDX-License-Identifier: Apache-2.0
"""``python -m sugar_pipeline VERB ...`` is ``sugar VERB ...``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sugar_pipeline.command_line import entry

if __name__ == "__main__":
    sys.exit(entry())
