# SPDX-License-Identifier: Apache-2.0
"""Examine a machine for offloading: its facts (``system``), its copies (``copies``), and the conclusions
(``findings``)."""
