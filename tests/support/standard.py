# SPDX-License-Identifier: Apache-2.0
"""The standard model repository: the folders of the server tests that need nothing special, loaded on demand."""

import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.chat import TEMPLATE, build_chat_checkpoint
from tests.support.client import Reply, post
from tests.support.paths import ROOT
from tests.support.slow_model import DECOUPLED, SLOW_MODEL

NUM_TOKENS = 8
"""Their `max_output_length`."""
EXIT_TIMEOUT = "--exit-timeout-secs=5"
"""Some tests leave a long request behind."""
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"config": DECOUPLED},
    "batched": {"config": "max_batch_size: 8 dynamic_batching { }"},
    "typed": {"config": "max_batch_size: 8", "parameters_as_inputs": True},
    "typed_stream": {"config": f"{DECOUPLED} max_batch_size: 8", "parameters_as_inputs": True},
    "flat_typed": {"parameters_as_inputs": True},
    "flat_typed_stream": {"config": DECOUPLED, "parameters_as_inputs": True},
    "slow": {"max_num_seqs": 1},
    "no_template": {},
    "own_template": {"chat_template": "chat.jinja"},
}
"""A tiny Llama with a chat template that never ends by itself; `text_output` has no prompt.

`slow` generates one sequence at a time, 10 tokens/s. `no_template` has no chat template, and `own_template` one in the
folder. `plain_stream` is a stream door to `plain`.
"""


class StandardServer:
    def __init__(self, root: Path, make_folder: Callable[..., Path]) -> None:
        self.checkpoint = build_chat_checkpoint(root / "chat")
        bare = build_tiny_checkpoint(root / "bare", "llama", eos_token_id=None)
        repository = root / "repository"
        for name, settings in FOLDERS.items():
            checkpoint = bare if name.endswith("_template") else self.checkpoint
            shared = {"huggingface_model": checkpoint, "max_output_length": NUM_TOKENS}
            make_folder(repository, name, exclude_input_in_output=True, **shared, **settings)
        (repository / "slow" / "1" / "model.py").write_text(SLOW_MODEL)
        (repository / "own_template" / "chat.jinja").write_text(TEMPLATE)
        shutil.copytree(ROOT / "stream_door", repository / "plain_stream")
        self.server = TritonServer(repository, arguments=["--model-control-mode=explicit", EXIT_TIMEOUT])

    def serve(self, *names: str) -> TritonServer:
        """Load the folders that are not loaded yet."""
        for reply in self._load(*(name for name in names if not self.server.is_model_ready(name))):
            assert reply.status == 200, reply.body
        return self.server

    @contextmanager
    def beside(self, repository: Path, on_demand: Collection[str] = ()) -> Iterator[TritonServer]:
        """Serve a module's own folders beside the standard ones; one that cannot be loaded says so in the index."""
        folders = [self.server.model_repository / folder.name for folder in repository.iterdir()]
        for folder in folders:
            shutil.copytree(repository / folder.name, folder)
        try:
            self._load(*(folder.name for folder in folders if folder.name not in on_demand))
            yield self.server
        finally:
            for folder in folders:
                post(self.server, f"/v2/repository/models/{folder.name}/unload", {}, timeout_s=200)
                shutil.rmtree(folder)

    def _load(self, *names: str) -> list[Reply]:
        def load(name: str) -> Reply:
            return post(self.server, f"/v2/repository/models/{name}/load", {}, timeout_s=280)

        with ThreadPoolExecutor() as pool:
            return list(pool.map(load, names))
