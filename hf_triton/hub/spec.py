# SPDX-License-Identifier: Apache-2.0
"""Names the repository or folder of a checkpoint, and its files that are needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSpec:
    """A checkpoint by name, and what a model folder needs of it."""

    name: str
    """A name on the Hub, or a folder on disk, which begins with `/`, `./` or `../`."""
    revision: str = "main"
    """A branch, tag or commit; folders on disk have none."""
    setting: str = "huggingface_model"
    """The setting that holds the name, for error messages."""
    needs_config: bool = True
    needs_weights: bool = True
    needs_tokenizer: bool = True
    allow_pickle: bool = False
    """Whether pickle weights are accepted if there are no safetensors."""
    trust_remote_code: bool = False
    """Whether the repository's Python files are needed."""
    gguf_file: str | None = None
    """A GGUF file that has config, tokenizer and weights: its name, or the end of it."""
    headers_only: bool = False
    """Whether of weights the headers alone are needed: the files are as long as the Hub's and otherwise empty."""
    repo_type: str = "model"
    """The Hub's kind of repository, `model` or `kernel`; of a kernel the builds for this machine are needed."""
    files: tuple[str, ...] = ()
    """The needed files, of what is no checkpoint; the other fields then say nothing."""

    @property
    def is_local(self) -> bool:
        """Whether the name is that of a folder on disk."""
        return self.name.startswith(("/", "./", "../"))

    @property
    def cache_name(self) -> str:
        """The repository's folder in a cache of the Hub's client."""
        return f"{self.repo_type}s--" + self.name.replace("/", "--")

    @property
    def revision_setting(self) -> str:
        settings = {"huggingface_model": "revision", "tokenizer": "tokenizer_revision"}
        return settings.get(self.setting, self.setting)
