# SPDX-License-Identifier: Apache-2.0
"""Captures that are larger than memory, cut into blocks that are trained one by one."""
