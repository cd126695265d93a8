# SPDX-License-Identifier: Apache-2.0
"""What tests share, and benchmarks use: scenes, recorded cases, stand-ins. No tests."""
