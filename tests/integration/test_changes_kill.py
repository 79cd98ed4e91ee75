# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed while a fleet exchanges keys, namespaces and disks."""

from __future__ import annotations

from pathlib import Path

from tests.forks import output_of_module
from tests.sizes import by_size


def test_writers_killed_amid_changes_of_keys_namespaces_and_disks_leave_no_wrong_block(tmp_path: Path) -> None:
    print(output_of_module("tests.integration.changes_killer", tmp_path / "kv", by_size(6, 200)))
