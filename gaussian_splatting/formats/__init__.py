# SPDX-License-Identifier: Apache-2.0
"""Files of Gaussians that other programs exchange, beside PLY."""
