# SPDX-License-Identifier: Apache-2.0
"""Results on a page in the browser: turned, compared, measured and cut."""
