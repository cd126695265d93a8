# SPDX-License-Identifier: Apache-2.0
"""What ``--doctor`` looks at, and how it is shown."""
