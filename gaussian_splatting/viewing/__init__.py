# SPDX-License-Identifier: Apache-2.0
"""A page in the browser to look at Gaussians, and what shows a running training there."""
