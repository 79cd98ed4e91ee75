# SPDX-License-Identifier: Apache-2.0
"""Capacity planning: replays request traces through the production managers with a virtual clock instead of bytes."""
