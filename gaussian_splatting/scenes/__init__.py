# SPDX-License-Identifier: Apache-2.0
"""Captures as they are given: photographs with cameras, in all layouts that are read."""
