# SPDX-License-Identifier: Apache-2.0
"""Further kinds of features, in turn, for photographs that those of every capture leave out."""
