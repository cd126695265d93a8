# SPDX-License-Identifier: Apache-2.0
"""A result in the format of another program: ``python export.py RESULT --to FORMAT``."""

from sugar_pipeline.command_line import script

main = script("export.py", __doc__, __name__)
