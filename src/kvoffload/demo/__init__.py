# SPDX-License-Identifier: Apache-2.0
"""The demo: one chat served three ways, compared token by token."""
