# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ``make bench``, or ``python -m bench [NAME...] [--short] [--json FILE]``.

Each module of this package named in ``BENCHES`` has ``run(short: bool) -> list[Row]``. A row compares a thing with a
named reference measured in the same run, interleaved, and states the ratio of medians. ``--short`` runs in the test
suite so that benchmarks never rot; its figures mean nothing.
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
    "two_tiers",
    "seals",
    "lmcache_adapters",
    "placement",
    "policies_mixed",
    "hints",
    "worth_loading",
    "worth_loading_engine",
    "busy",
)
