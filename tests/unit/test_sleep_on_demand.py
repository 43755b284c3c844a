# SPDX-License-Identifier: Apache-2.0
"""A gateway whose idle models fall asleep: no request is lost, and what admins, keys and requests may ask."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.hints import HEADER
from hf_triton_gateway.triton.endpoint import Endpoint
from hf_triton_gateway.triton.on_demand import OnDemand
from hf_triton_gateway.triton.repository import TritonRepository
from hf_triton_gateway.triton.triton_messages import EMBEDDING, EMBEDDINGS, TextRequest
from hf_triton_gateway.triton.triton_models import TritonModels
from tests.support.gateway import GatewayThread, wait_until
from tests.support.sleepy_triton import BYTES, SleepyTriton, sleepy_triton

ADMIN, USER = {"x-api-key": "sk-admin-0000"}, {"x-api-key": "sk-user-0000"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("sk-admin-0000 name=boss admin=true\nsk-user-0000 name=guest\n")
    return file


@pytest.fixture
def models() -> Iterator[tuple[SleepyTriton, str]]:
    with sleepy_triton(a={}, b={}, old=("b",)) as served:
        yield served


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_no_request_is_lost_while_models_fall_asleep_at_random(max_loaded: int) -> None:
    """Idle ones sleep at once, others put some to sleep directly; one is pinned, and stays."""
    pinned = {"pinned": "true"}
    with sleepy_triton(a={}, b={}, c={}, d=pinned if max_loaded == 2 else {}) as (triton, address):
        dice = random.Random(max_loaded)

        async def main() -> None:
            endpoint = Endpoint(address)
            repository = TritonRepository(endpoint, None, sleeps=True)
            on_demand = OnDemand(repository, Metrics(), 0.01, max_loaded, tick_s=0.005, yield_s=0.05)
            async with asyncio.timeout(60), on_demand.running():
                models = TritonModels(endpoint, 60.0, on_demand)

                async def client(number: int) -> None:
                    for _ in range(10):
                        size = dice.randint(1, 50)
                        name = dice.choice("abcd")
                        asked = TextRequest(name, f"{number}", EMBEDDINGS, {"text": ["x" * size]}, [EMBEDDING])
                        assert (await models.generate(asked))[EMBEDDING] == [size]
                        await asyncio.sleep(dice.random() * 0.05)

                async def meddle() -> None:
                    while True:
                        await asyncio.sleep(0.02)
                        if others := sorted(triton.awake - {"d"}):
                            await models.set_sleeping(dice.choice(others), is_sleeping=True)

                meddling = asyncio.ensure_future(meddle())
                await asyncio.gather(*map(client, range(8)))
                meddling.cancel()
                await asyncio.gather(meddling, return_exceptions=True)
                await models.close()
            await repository.close()

        asyncio.run(main())
        assert triton.most_awake <= max_loaded
        assert min(triton.num_sleeps, triton.num_wakes) > 5
        assert triton.loaded == set("abcd")
        assert max_loaded == 1 or "d" in triton.awake


def test_a_model_sleeps_when_all_its_instances_do() -> None:
    with sleepy_triton(a={"instances": "2"}) as (triton, address):
        triton.loaded = {"a"}

        async def main() -> None:
            repository = TritonRepository(Endpoint(address), None, sleeps=True)
            await repository.terms("a")
            for num_asleep, is_loaded in ((0, True), (1, True), (2, False)):
                repository._gauges = {("sleeping", "a"): num_asleep}
                assert await repository.loaded() == {"a": is_loaded}
            await repository.close()

        asyncio.run(main())


def embed(gateway: GatewayThread, model: str, headers: dict[str, str] = USER, **fields: Any) -> httpx.Response:
    body = {"model": model, "input": "Today", **fields}
    return httpx.post(f"{gateway.url}/v1/embeddings", json=body, headers=headers, timeout=60)


def listed(gateway: GatewayThread) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{gateway.url}/v1/models", headers=USER, timeout=60)
    return {model["id"]: model for model in answer.json()["data"]}


def test_an_idle_model_sleeps_and_one_that_cannot_is_unloaded(models: tuple[SleepyTriton, str], keys: Path) -> None:
    triton, address = models
    config = GatewayConfig(
        triton=address, port=0, on_demand=True, keep_alive=3600, sleep=True, max_loaded=1, api_key_file=keys
    )
    with GatewayThread(config) as gateway:
        for name in ("a", "b", "a"):
            assert embed(gateway, name).status_code == 200
        assert (triton.loaded, triton.asleep, triton.num_wakes) == ({"a"}, set(), 1)
        assert embed(gateway, "a", keep_alive="0s").status_code == 200
        wait_until(lambda: triton.asleep == {"a"})
        wait_until(lambda: listed(gateway)["a"].get("sleeping") is True)
        assert [(listed(gateway)[name]["loaded"], "sleeping" in listed(gateway)[name]) for name in "ab"] == [
            (True, True),
            (False, False),
        ]
        for wrong in ("soon", 10**400):
            refused = embed(gateway, "a", keep_alive=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")
            assert "a duration such as 30s, 10m or 1h, 0 (at once) or -1 (for ever)" in refused.text
        assert triton.asleep == {"a"}
        woken = httpx.post(f"{gateway.url}/wake_up?model=a", headers=ADMIN, timeout=60).json()
        assert (woken["is_sleeping"], woken["seconds"] > 0, triton.awake) == (False, True, {"a"})
        assert "sleeping" not in listed(gateway)["a"]


def test_admins_put_models_to_sleep(models: tuple[SleepyTriton, str], keys: Path) -> None:
    triton, address = models
    triton.loaded = {"a", "b"}
    with GatewayThread(GatewayConfig(triton=address, port=0, api_key_file=keys)) as gateway:

        def post(path: str, headers: dict[str, str] = ADMIN, **arguments: Any) -> tuple[int, Any]:
            answer = httpx.post(f"{gateway.url}{path}", headers=headers, timeout=60, **arguments)
            return answer.status_code, answer.json()

        slept = {"is_sleeping": True, "seconds": 0.01, "given_back_bytes": BYTES}
        assert post("/sleep?model=a&level=1") == (200, slept)
        assert post("/sleep", json={"model": "a"}) == (200, {**slept, "seconds": 0, "given_back_bytes": 0})
        asked = httpx.get(f"{gateway.url}/is_sleeping?model=a", headers=ADMIN, timeout=60)
        assert asked.json() == {"is_sleeping": True}
        assert [name for name, model in listed(gateway).items() if "sleeping" in model] == ["a"]
        answer = embed(gateway, "a", keep_alive="5m")  # without --on-demand nobody reads it
        assert (answer.status_code, answer.headers[HEADER], triton.asleep) == (200, "keep_alive", set())
        assert post("/wake_up", json={"model": "a"})[1]["is_sleeping"] is False
        for path, status, words in (
            ("/sleep", 400, "name one in the field model, or by ?model=NAME; there are 'a', 'b'"),
            ("/sleep?model=c", 404, "'c' does not exist"),
            ("/sleep?model=b", 400, "'b' cannot sleep: its process is of an older release"),
        ):
            given, told = post(path)
            assert (given, words in told["error"]["message"]) == (status, True), told
        triton.loaded.remove("b")
        assert (
            "'b' is not loaded, so that it neither sleeps nor wakes" in post("/wake_up?model=b")[1]["error"]["message"]
        )
        for headers, status, words in ((USER, 403, "and guest's has not"), ({}, 401, "a valid API key")):
            assert (status, True) == (post("/sleep?model=a", headers)[0], words in str(post("/sleep?model=a", headers)))
        assert httpx.get(f"{gateway.url}/is_sleeping?model=a", headers=USER, timeout=60).status_code == 403
        assert triton.awake == {"a"}
    with GatewayThread(GatewayConfig(triton=address, port=0)) as gateway:
        refused = httpx.post(f"{gateway.url}/sleep?model=a", timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "restricted")
        assert "admin=true, and this gateway has no --api-key-file" in refused.text
