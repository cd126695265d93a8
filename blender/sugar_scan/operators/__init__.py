# SPDX-License-Identifier: Apache-2.0
"""What the user calls: import, run, look through, export."""
