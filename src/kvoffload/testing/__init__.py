# SPDX-License-Identifier: Apache-2.0
"""Contracts, fakes and a manual clock, for this project's tests and for authors of a policy, store or tier.

Importing this package loads neither torch nor pytest. A contract is a test class whose name does not start with
``Test``, so that pytest does not collect it. Subclass it under a name that starts with ``Test``, and implement the
factory that its docstring describes.
"""

from kvoffload.testing.clock import ManualClock
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.testing.keys import key, keys
from kvoffload.testing.manager_contract import OffloadingManagerContract
from kvoffload.testing.policy_contract import CachePolicyContract, PolicyDriver
from kvoffload.testing.shared_store_contract import SharedStoreContract
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.testing.stores import FaultyStore, GatedStore
from kvoffload.testing.tier_contract import SecondaryTierContract

__all__ = [
    "BlockStoreContract",
    "CachePolicyContract",
    "FakeTier",
    "FaultyStore",
    "GatedStore",
    "ManualClock",
    "OffloadingManagerContract",
    "PolicyDriver",
    "SecondaryTierContract",
    "SharedStoreContract",
    "block_of",
    "key",
    "keys",
]
