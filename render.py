# SPDX-License-Identifier: Apache-2.0
"""Pictures or a video of results: ``python render.py RESULT ... -s SCENE``."""

from sugar_pipeline.command_line import script

main = script("render.py", __doc__, __name__)
