# SPDX-License-Identifier: Apache-2.0
"""A mesh measured against a known surface, and shown."""
