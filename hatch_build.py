# SPDX-License-Identifier: Apache-2.0
"""Add the addresses of the project to the package's metadata. Hatchling runs this file for each build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """Derive all addresses from ``repository`` in ``pyproject.toml``. Without it, the metadata contains none."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        repository = str(self.config["repository"]).rstrip("/")
        if repository:
            # Package indexes do not have the files of the checkout, so relative links would lead nowhere there.
            text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/raw/HEAD/", text)
            text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/blob/HEAD/", text)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/HEAD/docs/index.md",
                "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
