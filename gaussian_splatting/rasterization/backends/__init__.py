# SPDX-License-Identifier: Apache-2.0
"""Other packages behind the rasterizer's seam; none of them is ever required."""
