# SPDX-License-Identifier: Apache-2.0
"""Train SuGaR: ``python train.py -s SCENE -c CHECKPOINT -r dn_consistency``."""

from sugar_pipeline.command_line import main_of, run_script

main = main_of("train.py", __doc__)

if __name__ == "__main__":
    run_script(main)
