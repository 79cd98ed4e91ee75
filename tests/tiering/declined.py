# SPDX-License-Identifier: Apache-2.0
"""Show the answers and waits of a request while the engine's own cache grows: ``python -m tests.tiering.declined``.

Ten blocks of its prefix are in a fast tier. The next thirty are in a tier that was declined as slower than computing.
In each step, the request asks from one block later on.
"""

from __future__ import annotations

from tests.tiering.test_load_policy import Machine, prefix

FAST_S, SLOW_S = 0.1, 5.0


def main() -> None:
    machine = Machine(num_tiers=2)
    machine.learn(read_s=FAST_S)
    machine.below(prefix(3, of="slow"), tier=1)
    machine.read_s = SLOW_S
    machine.serve(3, of="slow")
    machine.compute()
    blocks = prefix(40, of="a")
    machine.below(blocks[:10])
    machine.below(blocks[10:], tier=1)
    request, begin, began_s = machine.start("r"), 0, machine.clock()
    num_read = [0, 0]
    while None in (answers := machine.ask(blocks[begin:], request)):
        machine.step()
        begin = min(begin + 1, 5)
        if begin < 5:
            continue
        tier = 0 if machine.tiers[0].jobs else 1
        machine.read_s = (FAST_S, SLOW_S)[tier]
        num_read[tier] += machine.read(tier)
    print(f"waited {machine.clock() - began_s:.1f} s for {answers.count(True)} blocks")
    print(f"read {num_read[0]} blocks from the fast tier, and {num_read[1]} from the one that was declined")


if __name__ == "__main__":
    main()
