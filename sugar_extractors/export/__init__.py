# SPDX-License-Identifier: Apache-2.0
"""Results in the formats of other programs."""
