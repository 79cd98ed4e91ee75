# SPDX-License-Identifier: Apache-2.0
"""Register offloading specs by name, and make a spec from a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvoffload.base import OffloadingSpec
from kvoffload.config import EngineLayout, OffloadingConfig, read_config_values
from kvoffload.errors import ConfigError
from kvoffload.registry import Registry

SPECS: Registry[type[OffloadingSpec]] = Registry("offloading spec", "kvoffload.specs")
"""All specs by name. Other packages add a spec with ``SPECS.register`` or the entry point ``kvoffload.specs``."""

SPECS.register("CPUOffloadingSpec", "kvoffload.cpu.spec:CPUOffloadingSpec")
SPECS.register("TieringOffloadingSpec", "kvoffload.tiering.spec:TieringOffloadingSpec")


def spec_class(config: OffloadingConfig) -> type[OffloadingSpec]:
    """Return the spec class that ``config`` names, from ``spec_module_path`` if that is set.

    Raises ``ConfigError`` if the name is unknown, cannot be imported or is not a spec.
    """
    name = config.spec_name or ("TieringOffloadingSpec" if config.secondary_tiers else "CPUOffloadingSpec")
    if config.spec_module_path is None:
        return SPECS.get(name)
    try:
        spec = getattr(importlib.import_module(config.spec_module_path), name)
    except (ImportError, AttributeError, ValueError, TypeError) as exc:  # the last two: an invalid name, such as ".x"
        raise ConfigError(f"spec_name {name!r} of {config.spec_module_path!r} cannot be imported: {exc}.") from exc
    if not (isinstance(spec, type) and issubclass(spec, OffloadingSpec)):
        raise ConfigError(f"{config.spec_module_path}:{name} is not a subclass of OffloadingSpec.")
    return spec


def read_config(values: Mapping[str, Any]) -> OffloadingConfig:
    """Return the configuration, after the checks of ``parse_config`` and of the spec that need no layout.

    Allocates and touches nothing. Raises ``ConfigError`` with all problems at once.
    """
    config, problems = read_config_values(values)
    with problems:
        spec_class(config).check_config(config)
    problems.raise_found()
    return config


def make_spec(config: OffloadingConfig, layout: EngineLayout) -> OffloadingSpec:
    """Return an instance of ``spec_class(config)``. Allocates nothing yet.

    Raises ``ConfigError`` as ``spec_class`` does, or if the spec rejects the configuration.
    """
    return spec_class(config)(config, layout)  # type: ignore[call-arg]
