# SPDX-License-Identifier: Apache-2.0
"""From Gaussians to a mesh."""
