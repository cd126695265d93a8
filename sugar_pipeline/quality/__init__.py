# SPDX-License-Identifier: Apache-2.0
"""How good results are: against a known surface, and against photographs."""
