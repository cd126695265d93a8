# SPDX-License-Identifier: Apache-2.0
"""What a run exports into one folder, and pictures of it."""
