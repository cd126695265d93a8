# SPDX-License-Identifier: Apache-2.0
"""Checks that the poses, images, masks and points of a capture agree with each other."""
