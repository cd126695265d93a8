# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests and benchmarks: scenes, recorded cases, stand-ins. No tests."""
