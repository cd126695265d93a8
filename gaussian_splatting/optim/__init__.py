# SPDX-License-Identifier: Apache-2.0
"""What a step changes: Adam, its moments, learning rates, densification."""
