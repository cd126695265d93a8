# SPDX-License-Identifier: Apache-2.0
"""A procedural scene with a known surface, taken through all stages."""
