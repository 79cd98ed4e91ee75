# SPDX-License-Identifier: Apache-2.0
"""What every test gets: subprocesses that see this checkout's sources, and Hypothesis without wall-clock limits."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

_ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]))

# Shared machines are slow at times: a deadline per example would fail for that alone.
settings.register_profile("kvoffload", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvoffload")
