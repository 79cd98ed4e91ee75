# SPDX-License-Identifier: Apache-2.0
"""Contracts, fakes and a manual clock, for this project's tests and for people who write their own policy, store,
tier or handler. Importing this package loads neither torch nor pytest.

A contract is a class of tests without the ``Test`` prefix that makes pytest collect it: inherit, and supply the
factory that its docstring names.
"""

from kvoffload.testing.clock import ManualClock
from kvoffload.testing.handler_contract import HandlerContract, HandlerRig
from kvoffload.testing.keys import key, keys
from kvoffload.testing.manager_contract import OffloadingManagerContract
from kvoffload.testing.policy_contract import CachePolicyContract, PolicyDriver
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.testing.stores import FaultyStore, GatedStore

__all__ = [
    "BlockStoreContract",
    "CachePolicyContract",
    "FaultyStore",
    "GatedStore",
    "HandlerContract",
    "HandlerRig",
    "ManualClock",
    "OffloadingManagerContract",
    "PolicyDriver",
    "key",
    "keys",
]
