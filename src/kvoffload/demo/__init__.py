# SPDX-License-Identifier: Apache-2.0
"""The demo: serves one chat three ways and compares them, token by token."""
