# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos of results, from cameras of the capture and along paths."""
