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
    "disk_store",
    "slab_eviction",
    "slab_locks",
    "several_disks",
    "fs_store",
    "single_blocks",
    "remote_store",
    "seals",
    "lmcache_adapters",
    "placement",
    "policies_mixed",
    "hints",
    "worth_loading",
    "worth_loading_engine",
    "busy",
)
