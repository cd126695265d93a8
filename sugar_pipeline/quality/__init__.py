# SPDX-License-Identifier: Apache-2.0
"""Quality of results: against a known surface, and against images."""
