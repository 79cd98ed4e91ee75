# SPDX-License-Identifier: Apache-2.0
"""Many servers and their router, with tiers that they share."""
