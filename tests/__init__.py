# SPDX-License-Identifier: Apache-2.0
"""Tests, and what they share."""

import os

# As many processes as cores run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sugar_utils  # noqa: E402, F401  before torch and pycolmap
