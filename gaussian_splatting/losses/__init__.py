# SPDX-License-Identifier: Apache-2.0
"""The colour loss, fused for CPUs and for GPUs, and its readable twin."""
