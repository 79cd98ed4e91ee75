# SPDX-License-Identifier: Apache-2.0
"""What a machine gives offloading: its facts (``system``), copies (``copies``), and what follows (``findings``)."""
