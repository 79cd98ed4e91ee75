# SPDX-License-Identifier: Apache-2.0
"""Print the changes of the installed vLLM to everything that kvoffload uses: ``scripts/try-vllm VERSION``. Reads its
sources; exits with 0, whatever it finds, since tests judge."""

from __future__ import annotations

from collections.abc import Iterable

from tests.engines.vllm.harness import installed_sources
from tests.engines.vllm.surface import missing
from tests.engines.vllm.test_environment import unknown_names
from tests.engines.vllm.test_fields import in_neither_list, unknown_readers
from tests.engines.vllm.test_updates import unknown_calls

from kvoffload.engines.vllm.versions import installed_version, release_of


def main() -> None:
    sources, version = installed_sources(), installed_version()
    changes: dict[str, Iterable[str]] = {
        "missing or different": missing(sources, release_of(version)),
        "new options, which count if they are set": in_neither_list(sources),
        "new variables, which count if they are set": unknown_names(sources),
        "new calls of workers, around which weights are compared": unknown_calls(sources),
        "new readers of the longest request (identity.py)": unknown_readers(sources),
    }
    print(f"vLLM {version}")
    for title, names in changes.items():
        print(f"* {title}: {', '.join(sorted(names)) or 'none'}")


if __name__ == "__main__":
    main()
