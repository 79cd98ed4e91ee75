# SPDX-License-Identifier: Apache-2.0
"""The seam to CUDA's driver."""

from __future__ import annotations

import pytest

from kvoffload.cpu.copy.driver import Driver
from kvoffload.errors import ConfigError


def test_without_a_driver_one_sentence_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"needs NVIDIA's driver, and libabsent.so.1 cannot be loaded .*; install"):
        Driver("libabsent.so.1")


def test_a_driver_that_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a driver for CUDA 12\.0 or newer, and libm.so.6 is older; update"):
        Driver("libm.so.6")
