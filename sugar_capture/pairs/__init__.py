# SPDX-License-Identifier: Apache-2.0
"""Pairs of images: which are matched, and which contradict the poses."""
