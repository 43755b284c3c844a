# SPDX-License-Identifier: Apache-2.0
"""Models that are loaded and unloaded behind a gateway."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, add_demo


def control(server: TritonServer, model: str, action: str) -> None:
    request = urllib.request.Request(f"{server.http_url}/v2/repository/models/{model}/{action}", data=b"{}")
    urllib.request.urlopen(request, timeout=60).close()


def ask(client: openai.OpenAI, *, stream: bool) -> str:
    answer = client.completions.create(model="demo", prompt="Today", max_tokens=4, temperature=0, stream=stream)
    return "".join(part.choices[0].text for part in (answer if isinstance(answer, openai.Stream) else [answer]))


@pytest.mark.full
def test_loaded_and_unloaded_folders_are_noticed(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    add_demo(tmp_path)
    make_folder(tmp_path, "broken", huggingface_model="./nowhere")
    arguments = ["--model-control-mode=explicit", "--load-model=demo"]
    with (
        TritonServer(tmp_path, arguments=arguments) as server,
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        whole = ask(client, stream=False)
        with pytest.raises(openai.InternalServerError, match="'demo_stream', which is not ready"):
            ask(client, stream=True)
        control(server, "demo_stream", "load")
        assert ask(client, stream=True) == whole
        control(server, "demo_stream", "unload")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="demo") as refused:
                ask(client, stream=True)
            assert refused.value.code == "not_loaded"
        assert ask(client, stream=False) == whole
        control(server, "demo", "unload")
        with pytest.raises(openai.NotFoundError):
            ask(client, stream=False)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("broken")
        with pytest.raises(urllib.error.HTTPError):
            control(server, "broken", "load")
        with pytest.raises(openai.InternalServerError, match="not ready: there is no folder") as failed:
            client.completions.create(model="broken", prompt="a")
        assert (failed.value.status_code, failed.value.code) == (503, "not_loaded")
        assert str(tmp_path) not in failed.value.message
        control(server, "demo", "load")
        assert ask(client, stream=False) == whole
