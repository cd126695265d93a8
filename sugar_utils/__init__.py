# SPDX-License-Identifier: Apache-2.0
"""Ground floor: what every other package stands on. Imported before torch by all of them."""

import os

# Idle OpenMP threads of torch would spin on the cores that the kernels' own threads need:
# on two cores that costs a third of all CPU time. Read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
