# SPDX-License-Identifier: Apache-2.0
"""The package's links and description, which depend on the address of the repository.

`PROJECT_URL` is that address, without a slash at its end; `make wheel` passes it on. With it, the links and pictures of
README.md work on a page of a registry. Without it, there are no project links, and links to files become plain text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = r"(?!https?:|#)([^)\s\"]+)"
PICTURES = (".gif", ".jpg", ".png", ".svg")


class ProjectMetadata(MetadataHookInterface):
    """Called by hatchling while a wheel or an editable installation is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `readme` and `urls`."""
        address, version = os.environ.get("PROJECT_URL", ""), metadata["version"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, address, version)}
        if address:
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/tree/v{version}/docs",
                "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }


def absolute_links(text: str, address: str, version: str) -> str:
    """The description with links to the files of a tag; without an address, with the words of links alone."""
    if not address:
        text = re.sub(rf"!\[[^\[\]]*\]\({RELATIVE}\)|<img [^>]*>", "", text)
        return re.sub(rf"\[([^\[\]]*)\]\({RELATIVE}\)", r"\1", text)

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith(PICTURES) else "blob"
        return f"{link[1]}{address}/{kind}/v{version}/{link[2]}"

    return re.sub(rf'(\]\(|\bsrc="|\bsrcset="){RELATIVE}', absolute, text)
