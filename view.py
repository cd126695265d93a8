# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: ``python view.py RESULT ...``."""

from sugar_pipeline.command_line import script

main = script("view.py", __doc__, __name__)
