# SPDX-License-Identifier: Apache-2.0
"""Game engines and web pages: shapes to collide with, levels of detail, a page of both."""
