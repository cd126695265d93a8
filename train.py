# SPDX-License-Identifier: Apache-2.0
"""Train SuGaR: ``python train.py -s SCENE -c CHECKPOINT -r dn_consistency``."""

from sugar_pipeline.command_line import script

main = script("train.py", __doc__, __name__)
