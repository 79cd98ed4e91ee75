# SPDX-License-Identifier: Apache-2.0
"""Test epochs: keys of different weights never match, and serving continues correctly after a reset."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connector.rig import Request, Rig

from kvoffload.base import OffloadingEvent, make_offload_key
from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.connector.epochs import FIRST, Epoch, Epochs
from kvoffload.errors import ConfigError


def config(**more: Any) -> OffloadingConfig:
    return parse_config({"cpu_bytes_to_use": "1MiB", **more})


def by_file(path: Path, version: str, **more: Any) -> OffloadingConfig:
    path.write_text(version)
    return config(weights_version={"file": str(path)}, **more)


@given(st.binary(min_size=1, max_size=70), st.binary(min_size=1, max_size=9))
def test_a_hash_is_masked_and_found_again(block_hash: bytes, seed: bytes) -> None:
    masked = Epoch(seed).mask(block_hash)
    assert len(masked) == len(block_hash)
    assert Epoch(seed).mask(masked) == block_hash
    assert FIRST.mask(block_hash) == block_hash


def test_epochs_share_no_keys() -> None:
    hashes = [n.to_bytes(8, "big") * 4 for n in range(1000)]
    epochs = [FIRST, Epoch(b"a"), Epoch(b"b")]
    assert len({epoch.mask(each) for epoch in epochs for each in hashes}) == 3000


def test_engines_see_their_own_hashes_in_events() -> None:
    key, epoch = make_offload_key(b"12345678", 3), Epoch(b"a")
    masked = make_offload_key(epoch.mask(b"12345678"), 3)
    (event,) = epoch.engine_events([OffloadingEvent([masked], "CPU", removed=True)])
    assert event == OffloadingEvent([key], "CPU", removed=True)


def test_without_a_name_every_reset_begins_an_epoch_of_the_engines_own() -> None:
    epochs = Epochs(config())
    seeds = [epochs.current.seed]
    for _ in range(3):
        epochs.reset()
        seeds.append(epochs.current.seed)
    assert seeds[0] == b""
    assert len(set(seeds)) == 4
    other = Epochs(config())
    other.reset()
    assert other.current.seed not in seeds
    assert epochs.get_stats() == {("cache_resets", "own"): 3}


def test_a_new_name_begins_the_epoch_of_all_engines_with_that_name(tmp_path: Path) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one"))
    assert epochs.current.seed == Epochs(config(weights_version="one")).current.seed != b""
    path.write_text("two")
    epochs.reset()
    assert epochs.current.seed == Epochs(config(weights_version="two")).current.seed
    path.write_text("one")
    epochs.use()
    epochs.reset()
    assert epochs.current.seed == Epochs(config(weights_version="one")).current.seed
    assert epochs.get_stats() == {("cache_resets", "named"): 2}


def test_a_reset_that_finds_the_old_name_trusts_no_block(tmp_path: Path) -> None:
    epochs = Epochs(by_file(tmp_path / "version", "one"))
    before = epochs.current
    epochs.reset()
    assert epochs.current.seed != before.seed
    epochs.reset()
    assert epochs.get_stats() == {("cache_resets", "own"): 2}


def test_a_second_reset_before_any_request_keeps_the_new_name(tmp_path: Path) -> None:
    """vLLM resets the connector when it pauses, and again when a client asks for a reset."""
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one"))
    path.write_text("two")
    epochs.reset()
    named = epochs.current
    epochs.reset()
    assert epochs.current.seed == named.seed
    assert epochs.current is not named  # jobs of before the second reset are stale
    epochs.use()
    epochs.reset()
    assert epochs.current.seed != named.seed
    assert epochs.get_stats() == {("cache_resets", "named"): 1, ("cache_resets", "kept"): 1, ("cache_resets", "own"): 1}


def test_where_resets_are_not_about_tiers_the_name_alone_decides(tmp_path: Path) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one", reset_tiers=False))
    one = epochs.use()
    epochs.reset()
    assert epochs.current.seed == one.seed
    path.write_text("two")
    epochs.reset()
    assert epochs.current.seed != one.seed
    assert epochs.get_stats() == {("cache_resets", "kept"): 1, ("cache_resets", "named"): 1}


@pytest.mark.parametrize("reset_tiers", [True, False])
def test_weights_that_changed_do_not_get_their_old_name_back(reset_tiers: bool, tmp_path: Path) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one", reset_tiers=reset_tiers))
    seen = {epochs.use().seed}
    for begin in (epochs.change, epochs.reset, epochs.reset):
        begin()
        assert epochs.use().seed not in seen
        seen.add(epochs.current.seed)
    for version in ("two", "one"):  # a program that writes a name after the update vouches for it
        path.write_text(version)
        epochs.reset()
        assert epochs.current.seed == Epochs(config(weights_version=version)).current.seed
    epochs.use()
    assert epochs.get_stats() == {("cache_resets", "own"): 3, ("cache_resets", "named"): 2}


def test_a_name_may_come_before_the_weights_but_counts_once_it_is_said_again(tmp_path: Path) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one"))
    epochs.use()
    path.write_text("two")
    epochs.reset()
    named = epochs.current.seed
    epochs.change()
    assert epochs.current.seed != named
    epochs.reset()
    assert epochs.current.seed == named
    epochs.change()
    epochs.use()  # a request has computed with weights that no one has named since
    epochs.reset()
    assert epochs.current.seed != named


def test_the_steps_of_one_update_are_one_epoch() -> None:
    epochs = Epochs(config())
    seeds = {epochs.use().seed}
    for device_is_empty in (False, False, True):
        epochs.change((), device_is_empty)
        assert epochs.current.is_closed is not device_is_empty
        assert epochs.current.seed not in seeds, "a copy of the engine, made in between, may get other weights"
        seeds.add(epochs.current.seed)
    assert epochs.get_stats() == {("cache_resets", "own"): 1}
    epochs.use()
    epochs.change()
    assert epochs.get_stats() == {("cache_resets", "own"): 2}
    unused = Epochs(config())
    unused.change()
    assert unused.get_stats() == {("cache_resets", "own"): 1}


def test_in_a_closed_epoch_nothing_is_stored_until_the_device_is_empty() -> None:
    rig = Rig()
    rig.store_prefix(16)
    waiting = rig.arrive(Request("waiting", 9, "q"))
    rig.scheduler.change_weights(device_is_empty=False)
    assert rig.scheduler.is_closed
    for request in (waiting, Request("new", 9, "r")):
        assert rig.admit(request, [20, 21, 22], computed=4).stores == ()
        rig.finish(request)
        assert rig.step().final_stores == ()
    rig.scheduler.open_epoch()
    rig.store_prefix(16)
    assert rig.ask(rig.arrive(Request("again", 17))) == (16, True)


@pytest.mark.parametrize("reset_tiers", [True, False])
def test_a_name_that_cannot_be_read_any_more_costs_the_blocks_alone(
    reset_tiers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one", reset_tiers=reset_tiers))
    one = epochs.use()
    path.unlink()
    epochs.reset()
    assert epochs.current.seed != one.seed
    assert "weights_version is read from" in caplog.text


def test_a_reset_says_what_it_began(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one"))
    path.write_text("two")
    with caplog.at_level(logging.INFO, "kvoffload"):
        epochs.reset()
    assert "Cache reset 1: named epoch, weights_version 'two'." in caplog.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "1 to 200 printable"),
        ("a\nb", "1 to 200 printable"),
        ("x" * 201, "1 to 200 printable"),
        ({"env": "X"}, 'text or {"file": path}'),
        ({}, 'text or {"file": path}'),
        ({"file": "/nowhere/at/all"}, "/nowhere/at/all, which cannot be read: No such file"),
    ],
)
def test_names_that_make_no_sense_are_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="weights_version") as refused:
        config(weights_version=value)
    assert said in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"a\nb", b"y" * 500])
def test_files_without_a_name_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="weights_version is read from"):
        config(weights_version={"file": str(path)})


@pytest.mark.parametrize("content", [b"one", b"one\r\n", b"\xef\xbb\xbfone\n"])
def test_files_of_any_editor_have_the_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_bytes(content)
    assert config(weights_version={"file": str(path)}).read_weights_version() == "one"


def test_a_reset_does_not_wait_for_a_pipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "version"
    epochs = Epochs(by_file(path, "one"))
    one = epochs.use()
    path.unlink()
    os.mkfifo(path)
    epochs.reset()
    assert epochs.current.seed != one.seed
    assert "it is not a regular file" in caplog.text


def test_a_request_that_is_admitted_again_after_a_reset_finds_nothing_of_before() -> None:
    """vLLM preempts running requests and resets in one call.

    It asks for hits again before it reports the preemption.
    """
    rig = Rig()
    # The tiers below keep their blocks: to the connector they are a manager whose reset forgets nothing.
    rig.manager.reset_cache = lambda: None  # type: ignore[method-assign]
    rig.store_prefix(8)
    request = Request("r", 9)
    assert rig.ask(rig.arrive(request)) == (8, True)
    rig.scheduler.reset_cache()
    assert rig.ask(request) == (0, False)
    rig.alloc(request, [0, 1, 2])
    (store,) = rig.step(rig.run(request, [0, 1, 2])).stores
    rig.end(store)
    rig.finish(request)
    assert rig.ask(rig.arrive(Request("o", 9))) == (8, True)
    rig.scheduler.reset_cache()
    assert rig.ask(rig.arrive(Request("p", 9))) == (0, False)


def test_a_request_that_stays_on_the_device_stores_nothing_more() -> None:
    rig = Rig()
    rig.manager.reset_cache = lambda: None  # type: ignore[method-assign]
    request = Request("r", 9)
    (store,) = rig.admit(request, [0, 1, 2]).stores
    rig.scheduler.reset_cache()
    rig.end(store)
    request.num_tokens = 17
    assert rig.step(rig.run(request, [3, 4], computed=9, new=False)).stores == ()
    rig.finish(request)
    assert rig.step().final_stores == ()
    assert rig.ask(rig.arrive(Request("o", 17))) == (0, False)


@pytest.mark.parametrize("loads", [True, False], ids=["the load succeeds", "it fails"])
def test_what_a_request_computes_upon_a_load_from_before_an_update_is_found_by_nobody(loads: bool) -> None:
    rig = Rig()
    rig.manager.reset_cache = lambda: None  # type: ignore[method-assign]
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 17))
    assert rig.ask(request) == (8, True)
    rig.alloc(request, range(30, 35), external=8)
    (load,) = rig.step().loads
    rig.scheduler.change_weights(device_is_empty=False)
    rig.end(load, success=loads)
    rig.alloc(request, range(30, 35))
    assert rig.step(rig.run(request, range(30, 35), computed=8 * loads)).stores == ()
    rig.finish(request)
    assert rig.step().final_stores == ()
    rig.scheduler.open_epoch()
    assert rig.ask(rig.arrive(Request("o", 17))) == (0, False)


def test_events_have_the_engines_hashes_on_both_sides_of_a_reset() -> None:
    rig = Rig()
    rig.store_prefix(8, "p")
    rig.scheduler.reset_cache()
    rig.store_prefix(8, "q")
    held: set[bytes] = set()
    for event in rig.scheduler.take_events():
        held = held - set(event.keys) if event.removed else held | set(event.keys)
    assert {make_offload_key(f"q/{n}".encode(), 0) for n in range(2)} <= held


def test_an_update_in_many_chunks_resets_the_manager_once() -> None:
    """Draining the tiers for each of the 30 chunks would take each tier's time limit every time."""
    rig = Rig()
    resets = [0]
    reset = rig.manager.reset_cache

    def count() -> None:
        resets[0] += 1
        reset()

    rig.manager.reset_cache = count  # type: ignore[method-assign]
    rig.scheduler.change_weights(True)
    assert resets[0] == 0, "nobody has looked for a block yet"
    first = Request("first", 16)
    rig.end(*rig.admit(first, range(4)).stores)
    for _ in range(30):
        rig.scheduler.change_weights(True)
    assert resets[0] == 1
    second = Request("second", 16)
    rig.end(*rig.admit(second, range(4, 8)).stores)
    rig.scheduler.change_weights(True)
    assert resets[0] == 2
    rig.finish(second)
    assert rig.ask(rig.arrive(Request("third", 17))) == (0, False)


def test_the_blocks_of_a_request_that_goes_on_in_an_epoch_with_the_same_keys_are_reset_again() -> None:
    rig = Rig(reset_tiers=False)
    running = Request("running", 16)
    rig.end(*rig.admit(running, range(4)).stores)
    assert rig.scheduler.reset_cache()
    running.num_tokens = 24
    rig.end(*rig.step(rig.run(running, range(6), computed=16)).stores)
    assert rig.manager.slots.num_idle, "it goes on, and stores"
    rig.scheduler.reset_cache()
    assert rig.manager.slots.num_idle == 0


class Name:
    """A name of the weights, which may be known later."""

    def __init__(self, value: str | None) -> None:
        self.value = value

    def __call__(self) -> str | None:
        return self.value


def test_weights_are_told_apart_by_their_name_unless_they_have_a_version() -> None:
    one, again, two = (Epochs(config(), Name(name)).current.seed for name in ("a", "a", "b"))
    assert one == again
    assert len({one, two, FIRST.seed, Epochs(config(weights_version="a")).current.seed}) == 4
    assert (
        Epochs(config(weights_version="a"), Name("b")).current.seed == Epochs(config(weights_version="a")).current.seed
    )


def test_until_the_weights_have_a_name_the_epoch_is_the_engines_own() -> None:
    name = Name(None)
    epochs = Epochs(config(), name)
    own = epochs.use()
    assert own.seed != Epochs(config(), Name(None)).current.seed
    assert not epochs.can_be_named
    name.value = "a"
    assert epochs.can_be_named
    epochs.name()
    assert epochs.current.seed == Epochs(config(), Name("a")).current.seed
    assert epochs.is_over(own)
    assert not epochs.can_be_named


@pytest.mark.parametrize("reset_tiers", [True, False])
def test_weights_that_change_before_they_have_a_name_never_get_it(reset_tiers: bool) -> None:
    name = Name(None)
    epochs = Epochs(config(reset_tiers=reset_tiers), name)
    epochs.use()
    epochs.reset()
    epochs.change()
    name.value = "a"
    assert not epochs.can_be_named
    epochs.reset()
    assert epochs.current.seed != Epochs(config(), Name("a")).current.seed


@pytest.mark.parametrize("reset_tiers", [True, False])
def test_a_reset_before_the_weights_have_a_name_does_as_it_does_after(reset_tiers: bool) -> None:
    name = Name(None)
    epochs = Epochs(config(reset_tiers=reset_tiers), name)
    before = epochs.use().seed
    epochs.reset()
    assert (epochs.current.seed == before) is not reset_tiers
    name.value = "a"
    assert epochs.can_be_named is not reset_tiers


def test_a_reset_that_was_only_a_part_of_a_sleep_is_undone() -> None:
    epochs = Epochs(config(), Name("a"))
    first = epochs.use().seed
    epochs.reset()
    epochs.undo_reset()
    assert epochs.current.seed == first
    epochs.undo_reset()
    assert epochs.current.seed == first
    epochs.use()
    epochs.reset()  # by the user
    cleared = epochs.current.seed
    epochs.reset()  # by the sleep
    epochs.undo_reset()
    assert epochs.current.seed == cleared != first


@pytest.mark.parametrize("since", ["a request", "an update", "a version", "a name"])
def test_a_reset_is_not_undone_if_more_has_happened_since(since: str, tmp_path: Path) -> None:
    version = tmp_path / "version"
    epochs = Epochs(by_file(version, "one") if since == "a version" else config(), Name("a"))
    before = epochs.use().seed
    if since == "a version":
        version.write_text("two")
    epochs.reset()
    if since == "a request":
        epochs.use()
    elif since == "an update":
        epochs.change()
    elif since == "a name":
        epochs.reset()
        epochs.use()
    after = epochs.current.seed
    epochs.undo_reset()
    assert epochs.current.seed == after != before


def test_a_reset_by_the_user_stays_one_when_the_weights_get_their_name_after_a_sleep() -> None:
    name = Name(None)
    epochs = Epochs(config(), name)
    epochs.use()
    epochs.reset()
    epochs.use()
    epochs.reset()
    epochs.undo_reset()
    name.value = "a"
    assert not epochs.can_be_named


def test_blocks_of_other_engines_are_found_once_the_weights_have_a_name() -> None:
    """Their own engine found them before, and finds them again when they are stored again."""
    name = Name(None)
    rig = Rig(weights_name=name)
    rig.store_prefix(8)
    name.value = "a"
    assert rig.ask(rig.arrive(Request("unnamed", 9))) == (0, False)
    rig.finish(Request("unnamed", 9))
    rig.store_prefix(8)
    assert rig.ask(rig.arrive(Request("named", 9))) == (8, True)
    events = [event for event in rig.scheduler.take_events() if not event.removed]
    assert {key for event in events for key in event.keys} >= {make_offload_key(f"p/{n}".encode(), 0) for n in range(2)}
