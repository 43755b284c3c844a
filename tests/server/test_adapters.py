# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a real server: chosen by name at every door, from the Hub and on disk, coming and going."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.adapters import generate_with, save_adapter
from tests.support.client import generate, infer
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

PROMPT = "Where does the river go?"
NUM_TOKENS = 8
ADAPTERS = ("sql", "tone", "local")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint `base`, adapters of it, and `misfit`, which is another model's."""
    root = tmp_path_factory.mktemp("adapters")
    base = build_tiny_checkpoint(root / "base", "llama", eos_token_id=None)
    for seed, name in enumerate((*ADAPTERS, "later", "changed")):
        save_adapter(base, root / name, seed=seed, target_modules="all-linear")
    save_adapter(build_tiny_checkpoint(root / "wide", "llama", hidden_size=128), root / "misfit")
    return root


@pytest.fixture(scope="module")
def server(
    root: Path, tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]
) -> Iterator[TritonServer]:
    """`llama` has an adapter of the Hub, one of a path, one of its subfolder, and one that does not fit."""
    repository = tmp_path_factory.mktemp("repository")
    adapters = {"sql": "someone/llama-sql", "tone": str(root / "tone"), "misfit": str(root / "misfit")}
    adapters["none"] = "someone/nothing"
    settings = {"huggingface_model": root / "base", "adapters": json.dumps(adapters), "max_output_length": NUM_TOKENS}
    folder = make_folder(repository, "llama", exclude_input_in_output="true", **settings)
    shutil.copytree(root / "local", folder / "adapters" / "local")
    make_folder(repository, "batch", engine="batch", exclude_input_in_output="true", **settings)
    with LoopbackHub() as hub:
        hub.add("someone/llama-sql", root / "sql")
        environment = {**hub.environment(), "TRANSFORMERS_CACHE": str(tmp_path_factory.mktemp("cache"))}
        with TritonServer(repository, environment=environment) as running:
            yield running


def expected(root: Path, adapter: str | None, prompt: str = PROMPT) -> str:
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    ids = generate_with(root / "base", root / adapter if adapter else None, tokenizer(prompt)["input_ids"], NUM_TOKENS)
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def text_of(server: TritonServer, adapter: str, model: str = "llama") -> str:
    answer = generate(server, model, PROMPT, lora_name=adapter).json()
    text: str = answer["text_output"]
    return text


@pytest.mark.parametrize("model", ["llama", "batch"])
@pytest.mark.parametrize("adapter", ["", "sql", "tone"])
def test_a_request_chooses_its_adapter(server: TritonServer, root: Path, model: str, adapter: str) -> None:
    assert text_of(server, adapter, model) == expected(root, adapter or None)


def test_adapters_differ_and_none_is_the_default(server: TritonServer, root: Path) -> None:
    assert len({expected(root, adapter) for adapter in (None, *ADAPTERS)}) == 4
    assert generate(server, "llama", PROMPT).json()["text_output"] == expected(root, None)


def test_the_forms_of_the_vllm_backend(server: TritonServer, root: Path) -> None:
    packed = generate(server, "llama", PROMPT, sampling_parameters=json.dumps({"lora_name": "sql"})).json()
    assert packed["text_output"] == expected(root, "sql")
    reply = infer(server, "llama", [PROMPT] * 2, parameters={"lora_name": "tone"}).json()
    assert reply["outputs"][0]["data"] == [expected(root, "tone")] * 2


def test_simultaneous_requests_with_all_adapters_equal_each_alone(server: TritonServer, root: Path) -> None:
    names = ["", *ADAPTERS] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        texts = list(pool.map(lambda name: text_of(server, name), names))
    assert texts == [expected(root, name or None) for name in names]


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("sqll", "adapter_not_found: there is no adapter 'sqll', did you mean 'sql'?"),
        ("misfit", "adapter_invalid: the adapter 'misfit' has tensors of other shapes than the model, as "),
        ("none", "adapter_invalid: the adapter 'none' cannot be loaded: "),
        (5, "lora_name must be a string"),
    ],
)
def test_adapters_that_cannot_be_used_refuse_their_requests_only(
    server: TritonServer, root: Path, adapter: object, words: str
) -> None:
    refused = generate(server, "llama", PROMPT, lora_name=adapter)
    assert refused.status == 400
    assert words in refused.json()["error"]
    assert text_of(server, "sql") == expected(root, "sql")


def test_an_adapter_comes_changes_and_goes_while_the_model_serves(server: TritonServer, root: Path) -> None:
    folder = server.model_repository / "llama" / "adapters" / "later"
    assert "adapter_not_found" in generate(server, "llama", PROMPT, lora_name="later").json()["error"]
    shutil.copytree(root / "later", folder)
    assert _wait_for(server, "later") == expected(root, "later")
    shutil.copytree(root / "changed", folder, dirs_exist_ok=True)
    time.sleep(1.1)
    assert text_of(server, "later") == expected(root, "changed")
    (folder / "adapter_model.safetensors").write_bytes(b"half a file")
    time.sleep(1.1)
    assert text_of(server, "later") == expected(root, "changed"), "it stays until the new files are whole"
    shutil.copytree(root / "later", folder, dirs_exist_ok=True)
    time.sleep(1.1)
    assert text_of(server, "later") == expected(root, "later")
    shutil.rmtree(folder)
    time.sleep(1.1)
    assert "adapter_not_found" in generate(server, "llama", PROMPT, lora_name="later").json()["error"]
    assert text_of(server, "local") == expected(root, "local")


def test_patterns_that_take_for_ever_stop_no_request(server: TritonServer, root: Path) -> None:
    """The layers' pattern is not run, the alphas' is stopped; requests of the base model and of others go on."""
    folder = server.model_repository / "llama" / "adapters"
    slow = "(?:[a-z._0-9]|[a-z._0-9]{2}|[a-z._0-9]{3})+[!-#]"
    for name, change in (("pattern", {"target_modules": slow}), ("alphas", {"alpha_pattern": {slow: 8}})):
        shutil.copytree(root / "local", folder / name)
        config = folder / name / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    assert _wait_for(server, "pattern") == expected(root, "local")
    refused = generate(server, "llama", PROMPT, lora_name="alphas")
    assert (
        "the adapter 'alphas' has patterns in rank_pattern or alpha_pattern that take too long"
        in refused.json()["error"]
    )
    for name in ("", "sql"):
        assert text_of(server, name) == expected(root, name or None)


def _wait_for(server: TritonServer, adapter: str) -> str:
    give_up_s = time.monotonic() + 10
    while "error" in (answer := generate(server, "llama", PROMPT, lora_name=adapter).json()):
        assert time.monotonic() < give_up_s, answer
        time.sleep(0.2)
    text: str = answer["text_output"]
    return text


def test_the_log_names_adapters_and_no_prompt(server: TritonServer) -> None:
    log = server.read_log()
    assert "adapter sql: loaded" in log
    assert "adapter misfit: its requests are refused" in log
    assert "engine continuous" in log
    assert PROMPT not in log


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[openai.OpenAI]:
    with (
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


@pytest.mark.parametrize("adapter", ["", "sql", "local"])
def test_an_openai_client_names_the_adapter_behind_the_model(client: openai.OpenAI, root: Path, adapter: str) -> None:
    name = f"llama:{adapter}" if adapter else "llama"
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=NUM_TOKENS)
    assert answer.model == name
    assert answer.choices[0].text == expected(root, adapter or None)
    named = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=NUM_TOKENS, extra_body={"lora_name": adapter or None}
    )
    assert named.choices[0].text == answer.choices[0].text


def test_models_lists_adapters_below_their_model(client: openai.OpenAI) -> None:
    parents = {model.id: model.model_dump().get("parent") for model in client.models.list()}
    assert parents == {
        **dict.fromkeys(("llama", "batch")),
        **{f"{model}:{name}": model for model in ("llama", "batch") for name in ("misfit", "none", "sql", "tone")},
    }
    assert client.models.retrieve("llama:sql").model_dump()["parent"] == "llama"


def test_wrong_adapters_of_an_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no adapter 'sqll', did you mean 'sql'") as unknown:
        client.completions.create(model="llama:sqll", prompt=PROMPT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.completions.create(model="nothing:sql", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="'misfit' has tensors of other shapes"):
        client.completions.create(model="llama:misfit", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="model names the adapter sql, and lora_name tone"):
        client.completions.create(model="llama:sql", prompt=PROMPT, extra_body={"lora_name": "tone"})
