# SPDX-License-Identifier: Apache-2.0
"""Many servers behind a router, with tiers that they share."""
