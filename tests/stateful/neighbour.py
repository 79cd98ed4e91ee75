# SPDX-License-Identifier: Apache-2.0
"""Another process on the root of a file store. It does what it is asked on its standard input, a line each.

``neighbour.py ROOT BLOCK_BYTES MAX_BYTES``. ``write NUMBERS``, ``discard NUMBERS`` and ``scan`` answer ``done``;
``begin`` reserves bytes and begins a file, and keeps both; ``hold`` holds the usage file until the next line.
"""

from __future__ import annotations

import sys

from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.fs import FileSystemStore


def main(root: str, block_bytes: int, max_bytes: int) -> None:
    store = FileSystemStore(root, block_bytes, max_bytes=max_bytes)
    while line := sys.stdin.readline().split():
        keys = keys_of(*map(int, line[1:]))
        match line[0]:
            case "write":
                store.write(keys, [memoryview(block_of(key, block_bytes)) for key in keys])
            case "discard":
                store.discard(keys)
            case "scan":
                for _ in store.scan():
                    pass
            case "begin":
                reservation = store._quota.reserve(1, store._layout.file_bytes, ())
                for temporary in reservation.temporaries:
                    with open(temporary, "wb") as file:
                        file.write(bytes(block_bytes // 2))
            case "hold":
                with store._quota._hold():
                    print("done", flush=True)
                    sys.stdin.readline()
                continue
        print("done", flush=True)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
