# SPDX-License-Identifier: Apache-2.0
"""Further kinds of features, one after the other, for images without a pose."""
