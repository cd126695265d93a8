# SPDX-License-Identifier: Apache-2.0
"""Ground floor: what every other package stands on. They all import it before anything else."""

import os

# Whichever of Pillow and pycolmap is loaded second uses image libraries of the first. Pillow's
# serve both; with pycolmap's, saving a PNG corrupts the heap: it hangs or aborts within a few.
from PIL import _imaging  # noqa: F401

# Idle OpenMP threads of torch would spin on the cores that the kernels' own threads need:
# on two cores that costs a third of all CPU time. Read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
