# SPDX-License-Identifier: Apache-2.0
"""After an update of weights nothing is known to be of one set of weights, until a version or a clear names them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload.engines.sglang import updates
from kvoffload.engines.sglang.updates import ServedWeights, watch, watch_from_the_start
from kvoffload.errors import ConfigError


class Updater:
    """The watched part of SGLang's updater. ``done`` records its calls."""

    done: list[str]

    def __init__(self) -> None:
        self.done = []

    def init_weights_update_group(self, request: Any) -> str:
        return "nothing has changed"


def _does(name: str) -> Any:
    def step(self: Updater, request: Any) -> str:
        self.done.append(f"{name} of {request}")
        return name

    return step


STEPS = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "begin_weight_update", "end_weight_update", "resume_memory_occupation"),
    "a_step_of_a_newer_sglang",
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedWeights:
    monkeypatch.setattr(updates, "SERVED", served := ServedWeights())
    return served


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's modules, as in a scheduler's process that serves weights of version ``v1``."""

    class Manager(Updater):
        pass

    class Controller:
        def reset(self) -> str:
            return "reset"

    for name in STEPS:
        setattr(Manager, name, _does(name))
    serving = SimpleNamespace(weight_version="v1")
    contents: dict[str, dict[str, Any]] = {
        updates._UPDATER: {"SchedulerWeightUpdaterManager": Manager},
        updates._CONTROLLER: {"HiCacheController": Controller},
        updates._CONTEXT: {"get_serving": lambda: serving},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(Manager=Manager, Controller=Controller, serving=serving)


@pytest.mark.parametrize("step", STEPS)
def test_each_step_that_may_change_weights_is_seen_and_done(step: str, served: ServedWeights, sglang) -> None:
    watch()
    watch()
    updater = sglang.Manager()
    assert getattr(updater, step)("request") == step
    assert updater.done == [f"{step} of request"]
    assert (served.num_changes, served.is_named) == (1, False)


def test_what_changes_no_weights_is_left_alone(served: ServedWeights, sglang) -> None:
    watch()
    assert sglang.Manager().init_weights_update_group("request") == "nothing has changed"
    assert sglang.Controller().reset() == "reset"
    assert served.num_changes == 0


def test_memory_that_comes_back_may_have_no_weights_in_it(served: ServedWeights, sglang) -> None:
    watch()
    updater = sglang.Manager()
    updater.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert served.num_changes == 0
    updater.resume_memory_occupation(SimpleNamespace(tags=["kv_cache", "weights"]))
    updater.resume_memory_occupation(SimpleNamespace(tags=None))
    assert served.num_changes == 2


def test_a_version_that_cannot_be_watched_is_left_alone(served: ServedWeights, sglang) -> None:
    del sglang.Manager.update_weights_from_ipc
    watch()
    sglang.Manager().update_weights_from_disk("request")
    assert (served.num_changes, served.is_watched) == (0, False)
    with pytest.raises(ConfigError, match="update_weights_from_ipc"):
        watch_from_the_start(is_start=True)


def test_processes_without_a_scheduler_are_left_alone(served: ServedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, updates._UPDATER, raising=False)
    watch()
    assert not served.is_watched


def test_a_storage_that_comes_later_wants_to_have_watched_from_the_start(served: ServedWeights, sglang) -> None:
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"):
        watch_from_the_start(is_start=False)
    watch()
    watch_from_the_start(is_start=False)


def test_an_updater_that_cannot_be_watched_is_refused(served: ServedWeights, sglang) -> None:
    del sglang.Manager.update_weights_from_ipc
    with pytest.raises(ConfigError, match="update_weights_from_ipc"):
        watch_from_the_start(is_start=True)


def test_pages_of_older_weights_are_known_to_be_gone_after_a_flush(served: ServedWeights) -> None:
    assert served.is_flushed
    served.change("v1")
    assert not served.is_flushed
    served.clear()
    assert not served.is_flushed, "SGLang keeps its own pages"
    served.flush()
    assert served.is_flushed


def test_a_clear_names_what_is_served_and_makes_keys_of_its_own(served: ServedWeights) -> None:
    served.change("v1")
    served.clear()
    first = served.salt
    assert served.is_named
    assert first
    served.change("v1")
    assert not served.is_named
    served.clear()
    assert served.salt != first


def test_a_version_names_weights_if_it_is_new_and_the_old_ones_pages_are_forgotten(served: ServedWeights) -> None:
    assert served.why_not_named_by("v1") is None
    served.change(None)
    served.flush()
    assert served.why_not_named_by("v1") is not None, "nobody knows the version before"
    served.change("v1")
    assert "does not name the new ones" in str(served.why_not_named_by("v1"))
    assert "/flush_cache" in str(served.why_not_named_by("v2"))
    served.flush()
    assert served.why_not_named_by("v2") is None
    assert served.is_named


def test_the_version_that_stands_for_the_files_names_no_update(served: ServedWeights) -> None:
    served.change("v1")
    served.flush()
    assert served.why_not_named_by("default") is not None
    assert served.why_not_named_by("v2") is None


def test_the_version_of_an_older_update_names_no_newer_weights(served: ServedWeights) -> None:
    served.change("v1")
    served.change("v2")
    served.flush()
    assert served.why_not_named_by("v2") is not None


def test_the_steps_of_one_update_may_all_have_its_version(served: ServedWeights, sglang) -> None:
    watch()
    updater = sglang.Manager()
    updater.begin_weight_update("request")
    sglang.serving.weight_version = "v2"  # as the first tensors say
    updater.update_weights_from_tensor("request")
    updater.end_weight_update("request")
    assert served.why_not_named_by("v2") is not None, "SGLang may have computed between two steps"
    sglang.Controller().reset()
    assert served.why_not_named_by("v2") is None
