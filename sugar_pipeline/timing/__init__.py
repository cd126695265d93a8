# SPDX-License-Identifier: Apache-2.0
"""How long stages take, and lengths of stages for runs that are to end in time."""
