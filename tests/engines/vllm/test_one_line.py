# SPDX-License-Identifier: Apache-2.0
"""Test that a server needs only ``KVOFFLOAD_CONFIG``: the settings that the plug-in adds, and those that it leaves
alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.models import SmallModel

from kvoffload.engines.vllm import register
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.errors import ConfigError

pytestmark = pytest.mark.vllm

OURS = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [OTHER, OURS]},
}


def transfer_of(model: SmallModel, transfer: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    register()
    engine = EngineArgs(model=model.path, dtype="float32", max_model_len=1280, kv_transfer_config=transfer, **arguments)
    return engine.create_engine_config().kv_transfer_config


@pytest.fixture
def variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "offload.yaml"
    file.write_text("cpu_bytes_to_use: 64MiB\n")
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(file))
    return file


@pytest.mark.parametrize("given", [None, OURS])
def test_the_variable_is_enough(given: dict[str, Any] | None, llama: SmallModel, variable: Path) -> None:
    transfer = transfer_of(llama, given)
    assert (transfer.kv_connector, transfer.kv_role) == ("KVOffloadConnector", "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Collect the warnings of kvoffload's logger below vLLM's, whose records do not propagate."""
    logger, found = logging.getLogger("vllm.kvoffload.engines.vllm"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("given", [None, OURS, MULTI])
def test_processes_without_the_variable_find_the_file(
    given: dict[str, Any] | None, llama: SmallModel, variable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's actors are an example: vLLM copies its configuration and only some variables to them."""
    monkeypatch.chdir(variable.parent)
    monkeypatch.setenv("KVOFFLOAD_CONFIG", variable.name)
    extra = transfer_of(llama, given).kv_connector_extra_config
    if given is MULTI:
        extra = extra["connectors"][1]["kv_connector_extra_config"]
    monkeypatch.delenv("KVOFFLOAD_CONFIG")
    monkeypatch.chdir("/")
    assert config_of(extra).cpu_bytes == 64 << 20


def test_a_file_that_the_server_names_itself_wins(llama: SmallModel, variable: Path) -> None:
    other = variable.with_name("other.yaml")
    other.write_text("cpu_bytes_to_use: 32MiB\n")
    extra = transfer_of(llama, OURS | {"kv_connector_extra_config": {"config_file": str(other)}})
    assert config_of(extra.kv_connector_extra_config).cpu_bytes == 32 << 20


def test_other_connectors_stay_as_they_are(llama: SmallModel, variable: Path, warnings: list[str]) -> None:
    transfer = transfer_of(llama, OTHER)
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == ("ExampleConnector", "fail")
    assert len(warnings) == 1 and "ExampleConnector" in warnings[0]


def test_vllms_own_offloading_stays_as_it_is(llama: SmallModel, variable: Path, warnings: list[str]) -> None:
    assert transfer_of(llama, kv_offloading_size=0.1).kv_connector == "OffloadingConnector"
    assert len(warnings) == 1 and "KVOFFLOAD_CONFIG" in warnings[0] and "--kv-offloading-size" in warnings[0]


def test_beside_others_of_one_connector_nothing_is_warned_of(
    llama: SmallModel, variable: Path, warnings: list[str]
) -> None:
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer_of(llama, both | {"kv_connector_extra_config": {"connectors": [OURS, OTHER]}})
    assert warnings == []


def test_a_blank_variable_is_none(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_CONFIG", "")
    assert transfer_of(llama) is None


def test_without_the_variable_nothing_is_filled_in(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVOFFLOAD_CONFIG", raising=False)
    assert transfer_of(llama) is None
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        transfer_of(llama, OURS | {"kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB"}})


def test_mistakes_in_the_file_are_refused_before_an_engine_starts(llama: SmallModel, variable: Path) -> None:
    variable.write_text("cpu_bytes: 64MiB\n")
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        transfer_of(llama)
