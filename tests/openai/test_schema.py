# SPDX-License-Identifier: Apache-2.0
"""The gateway's own OpenAPI document against the gateway: generated requests, valid and not."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from hf_triton_gateway.app import build_app
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

CHECKS: list[Any] = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HELLO = [{"role": "user", "content": "Hello!"}]
LIMITS = {
    "model": "tiny",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), 3),
    **dict.fromkeys(("min_tokens", "n", "best_of"), 1),
    **dict.fromkeys(("max_time", "timeout"), 60.0),
}
NUM_TOKEN_IDS = 300
OF_OTHERS = [
    *(f"/v1/{name}" for name in ("embeddings", "rerank", "score", "classify", "token-classification", "fill-mask")),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/info", "/tokenizer_info"),
    *("/v2/embed", "/v2/rerank"),
    *("/sleep", "/wake_up", "/is_sleeping"),
]
"""Paths that are not answered with 200 here, for want of a model or a key; test_encoders.py, test_tei.py, ... do so."""


DOCUMENT = build_app(GatewayConfig()).openapi()


def schema() -> Any:
    refusals = {"expected-statuses": [400, 404, 413, 415, 422]}  # 413: thousands of documents may be too large
    config = schemathesis.config.SchemathesisConfig.from_dict(
        {"seed": 1, "checks": {"negative_data_rejection": refusals}}
    )
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


SCHEMA = schema()
OPERATIONS = {f"{each.ok().method.upper()} {each.ok().path}": each.ok() for each in SCHEMA.get_all_operations()}
"""By method and path."""
MODES = {"valid": GenerationMode.POSITIVE, "invalid": GenerationMode.NEGATIVE}
CASES = [
    pytest.param(name, mode, id=f"{name} {word}")
    for name in OPERATIONS
    for word, mode in MODES.items()
    if word == "valid" or (name.startswith("POST") and "{" not in name)  # others take nothing that could be invalid
]


@pytest.fixture
def healthy(gateway: GatewayThread, client: openai.OpenAI) -> Iterator[GatewayThread]:
    yield gateway
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert client.completions.create(model="demo", prompt="a", max_tokens=2).choices[0].text


def bounded(case: Any) -> Any:
    """The case, for a model that exists, with few tokens, and without what its schema cannot tell."""
    body = case.body
    if isinstance(body, dict):
        body |= {name: value for name, value in LIMITS.items() if name in body}
        body |= {name: int(value) for name, value in body.items() if isinstance(value, float) and value.is_integer()}
        if body.get("messages"):
            body["messages"] = HELLO
            body.pop("prompt", None)
        if not body.get("stream"):
            body.pop("stream_options", None)
        if "tokens" in body:
            body["tokens"] = [token % NUM_TOKEN_IDS for token in body["tokens"]]
    return case


def is_wrong_by_unknown_fields_alone(case: Any) -> bool:
    """Whether a body is valid without the fields that the document does not know: such a body may be taken."""
    content = DOCUMENT["paths"][case.operation.path]["post"]["requestBody"]["content"].get(case.media_type, {})
    body, reference = case.body, content.get("schema", {}).get("$ref")
    if reference is None or not isinstance(body, dict):
        return False
    properties = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    known = {name: value for name, value in body.items() if name in properties}
    validator = Draft202012Validator({"$ref": reference, "components": DOCUMENT["components"]})
    return known != body and validator.is_valid(known)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_answers_are_those_of_the_document(healthy: GatewayThread, name: str, mode: GenerationMode) -> None:
    operation = OPERATIONS[name]
    is_valid, statuses = mode is GenerationMode.POSITIVE, set[int]()

    @settings(
        max_examples=30,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        is_taken = is_valid or is_wrong_by_unknown_fields_alone(case)
        checks = CHECKS if is_taken else [*CHECKS, negative_data_rejection]
        sent = bounded(case) if is_valid else case
        statuses.add(sent.call_and_validate(base_url=healthy.url, checks=checks, timeout=60).status_code)

    check()
    assert 200 in statuses or not is_valid or "{" in name or name.partition(" ")[2] in OF_OTHERS
