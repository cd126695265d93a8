# SPDX-License-Identifier: Apache-2.0
"""Helpers of all other packages, which import this package before anything else."""

import os

# The second one of Pillow and pycolmap to be loaded uses the image libraries of the first. Pillow's
# work for both; with pycolmap's, saving a few PNG files corrupts the heap.
from PIL import _imaging  # noqa: F401

# Idle OpenMP threads of torch would spin on the cores that the kernels' own threads need:
# on two cores that costs a third of all CPU time. Read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
