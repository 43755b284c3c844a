# SPDX-License-Identifier: Apache-2.0
"""One tritonserver and one gateway in front of it for all modules, and the real `openai` client."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat import build_chat_checkpoint
from tests.support.gateway import GatewayThread, add_demo
from tests.support.harmony import build_harmony_checkpoint
from tests.support.paths import ROOT, load_script
from tests.support.slow_model import DECOUPLED, SLOW_MODEL
from tests.support.writing_model import CHATML, WRITING_MODEL, build_writing_checkpoint

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.chat_page import Chat

NUM_TOKENS = 8
"""`max_output_length` of the tiny models, which never end by themselves."""
FIM = ("prefix", "suffix", "middle")
TINY: dict[str, str] = {"tiny": "", "slow": "", "decoupled": DECOUPLED, "batching": "max_batch_size: 4"}
"""Tiny models and their config. `slow` generates one sequence at a time, 10 tokens/s; `tiny` has no stream door."""


@pytest.fixture(scope="package")
def triton(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[TritonServer]:
    """A server with the demo model and its stream door, the folders of TINY, and `bare`, which has no template.

    `bare` has the tokens of Qwen's coders for what is filled in.
    """
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("openai")
    checkpoint, repository = build_chat_checkpoint(root / "chat"), root / "repository"
    add_demo(repository)
    for name, config in TINY.items():
        settings = {"max_num_seqs": 1} if name == "slow" else {}
        shared = {"huggingface_model": checkpoint, "max_output_length": NUM_TOKENS, "config": config}
        make_folder(repository, name, **shared, **settings)
    (repository / "slow" / "1" / "model.py").write_text(SLOW_MODEL)
    shutil.copytree(ROOT / "stream_door", repository / "slow_stream")
    bare = build_tiny_checkpoint(root / "bare", "llama", eos_token_id=None, vocab_size=387)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|fim_{part}|>" for part in FIM]})
    tokenizer.save_pretrained(bare)
    make_folder(repository, "bare", huggingface_model=bare, max_output_length=NUM_TOKENS, config=DECOUPLED)
    with TritonServer(repository, ready_timeout_s=280) as server:
        for name in ("demo", "demo_stream", "slow_stream", "bare", *TINY):
            assert server.is_model_ready(name), server.log_tail()
        yield server


@pytest.fixture(scope="package")
def gateway(triton: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0)) as running:
        yield running


@pytest.fixture(scope="package")
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="package")
def encoder_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By folder; `prompted` has prompts, `states` gives the vectors of tokens."""
    from sentence_transformers import SentenceTransformer

    from tests.support.sentence_checkpoints import real_checkpoint
    from tests.support.sparse_checkpoints import save_splade
    from tests.support.tasks import save_task_checkpoint

    root = tmp_path_factory.mktemp("encoders")
    prompted = SentenceTransformer(str(real_checkpoint()), device="cpu")
    prompted.prompts = {"query": "Represent this: ", "passage": "Keep this: "}
    prompted.save(str(root / "prompted"))
    return {
        "minilm": real_checkpoint(),
        "prompted": root / "prompted",
        "states": real_checkpoint(),
        "splade": save_splade(root / "splade"),
        "reranker": save_task_checkpoint(root / "reranker", "bert", "sequence", num_labels=1),
        "sentiment": save_task_checkpoint(root / "sentiment", "distilbert", "sequence", num_labels=3),
        "writer": build_tiny_checkpoint(root / "writer"),
    }


@pytest.fixture(scope="package")
def encoder_adapters(encoder_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`law` of the embedder, and `own` of the classifier, with a head of its own."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    from tests.support.adapters import save_lora

    root = tmp_path_factory.mktemp("adapters")
    embedder = AutoModel.from_pretrained(encoder_checkpoints["minilm"])
    classifier = AutoModelForSequenceClassification.from_pretrained(encoder_checkpoints["sentiment"])
    return {
        "law": save_lora(embedder, root / "law", target_modules=["query", "value"]),
        "own": save_lora(classifier, root / "own", target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS"),
    }


@pytest.fixture(scope="package")
def encoders(
    encoder_checkpoints: dict[str, Path],
    encoder_adapters: dict[str, Path],
    make_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    more: dict[str, dict[str, object]] = {
        "minilm": {"adapters": json.dumps({"law": str(encoder_adapters["law"])})},
        "states": {"task": "feature-extraction"},
    }
    for name, checkpoint in encoder_checkpoints.items():
        make_folder(repository, name, huggingface_model=checkpoint, **more.get(name, {}))
    shutil.copytree(encoder_adapters["own"], repository / "sentiment" / "adapters" / "own")
    with TritonServer(repository, ready_timeout_s=280) as server:
        yield server


@pytest.fixture(scope="package")
def agents(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[GatewayThread]:
    """A gateway with `writes`, which writes what it is told to, `free`, of random weights, and their stream doors.

    `harmony` writes too, as gpt-oss does.
    """
    root = tmp_path_factory.mktemp("agents")
    writing = build_writing_checkpoint(root / "writing", max_position_embeddings=131_072)
    folder = make_folder(root / "repository", "writes", huggingface_model=writing, max_output_length=4000)
    channels = build_harmony_checkpoint(root / "channels", max_position_embeddings=4096)
    harmony = make_folder(root / "repository", "harmony", huggingface_model=channels, config=DECOUPLED)
    for made in (folder, harmony):
        (made / "1" / "model.py").write_text(WRITING_MODEL)
    no_thinking = json.dumps({"thinking_budget": 0})
    checkpoint = build_tiny_checkpoint(root / "checkpoint", chat_template=CHATML, max_position_embeddings=40_960)
    shared = {"huggingface_model": checkpoint, "max_output_length": 400}
    free = make_folder(root / "repository", "free", generation_defaults=no_thinking, **shared)
    for served in (folder, free):
        shutil.copytree(ROOT / "stream_door", served.with_name(f"{served.name}_stream"))
    with TritonServer(root / "repository") as server:
        for name in ("writes", "writes_stream", "free", "free_stream", "harmony"):
            assert server.is_model_ready(name), server.log_tail()
        with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as running:
            yield running


@pytest.fixture(scope="package")
def openai_agent(agents: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="package")
def responses(openai_agent: openai.OpenAI) -> Any:
    return openai_agent.responses


@pytest.fixture(scope="package")
def messages(agents: GatewayThread) -> Iterator[Any]:
    import anthropic  # its import takes seconds

    with anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected.messages


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A Chromium without a window; skips without one, unless REQUIRE_CHROMIUM=1 is set: `apt-get install chromium`."""
    screenshot = load_script("screenshot_page")
    executable = screenshot.find_chromium()
    if executable is None and not os.environ.get("REQUIRE_CHROMIUM"):
        pytest.skip("there is no Chromium: apt-get install chromium")
    with screenshot.open_browser(executable) as browser:
        yield browser


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Callable[..., "Chat"]]:
    """Open a tab of a width, with its own storage: `open_page(390, color_scheme="dark")`."""
    from tests.support.chat_page import WIDE, Chat

    contexts = []

    def open_(width: int = WIDE, **options: Any) -> Chat:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        return Chat(context.new_page())

    yield open_
    for context in contexts:
        context.close()
