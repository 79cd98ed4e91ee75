# SPDX-License-Identifier: Apache-2.0
"""Offloading specs by name, and the function that makes one from a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvoffload.base import OffloadingSpec
from kvoffload.config import EngineLayout, OffloadingConfig, read_config_values
from kvoffload.errors import ConfigError
from kvoffload.registry import Registry

SPECS: Registry[type[OffloadingSpec]] = Registry("offloading spec", "kvoffload.specs")
"""Every spec by name. Outsiders add one with ``SPECS.register`` or the entry point ``kvoffload.specs``."""

SPECS.register("CPUOffloadingSpec", "kvoffload.cpu.spec:CPUOffloadingSpec")
SPECS.register("TieringOffloadingSpec", "kvoffload.tiering.spec:TieringOffloadingSpec")


def spec_class(config: OffloadingConfig) -> type[OffloadingSpec]:
    """The spec that ``config`` names, from ``spec_module_path`` if that is set.

    Raises ``ConfigError`` if the name is unknown, fails to import or is not a spec.
    """
    name = config.spec_name or ("TieringOffloadingSpec" if config.secondary_tiers else "CPUOffloadingSpec")
    if config.spec_module_path is None:
        return SPECS.get(name)
    try:
        spec = getattr(importlib.import_module(config.spec_module_path), name)
    except (ImportError, AttributeError, ValueError, TypeError) as exc:  # the last two: a name of no module, as ".x"
        raise ConfigError(f"spec_name {name!r} of {config.spec_module_path!r} fails to import: {exc}.") from exc
    if not (isinstance(spec, type) and issubclass(spec, OffloadingSpec)):
        raise ConfigError(f"{config.spec_module_path}:{name} is not an OffloadingSpec.")
    return spec


def read_config(values: Mapping[str, Any]) -> OffloadingConfig:
    """``parse_config``, with what the spec refuses whatever the layout. Allocates and touches nothing.

    Raises ``ConfigError`` with all problems at once.
    """
    config, problems = read_config_values(values)
    with problems:
        spec_class(config).check_config(config)
    problems.raise_found()
    return config


def make_spec(config: OffloadingConfig, layout: EngineLayout) -> OffloadingSpec:
    """An instance of ``spec_class(config)``. Allocates nothing yet. Raises ``ConfigError`` for whatever the spec itself
    refuses, too."""
    return spec_class(config)(config, layout)  # type: ignore[call-arg]
