# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ``make bench``, or ``python -m bench [NAME...] [--short] [--json FILE]``.

Each module of this package named in ``BENCHES`` defines ``run(short: bool) -> list[Row]``. A row compares a figure with
a named reference that is measured alternately in the same run, and reports the ratio of medians. The tests run
``--short``, so that benchmarks keep working; its figures are meaningless.
"""

BENCHES: tuple[str, ...] = (
    "control_plane",
    "connector",
    "tiering",
    "host_copies",
    "device_copies",
    "remote_store",
    "seals",
    "busy",
)
