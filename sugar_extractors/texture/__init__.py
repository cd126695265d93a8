# SPDX-License-Identifier: Apache-2.0
"""From a refined model to a textured mesh."""
