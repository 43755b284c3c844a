# SPDX-License-Identifier: Apache-2.0
"""A decoupled model can be unloaded however often it was asked what it is."""

import asyncio
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.triton.calls import Calls
from hf_triton_gateway.triton.model_infos import ModelInfos
from hf_triton_gateway.triton.triton_messages import Folder
from tests.support.gateway import wait_until
from tests.support.slow_model import DECOUPLED

NUM_TIMES, NUM_TOGETHER = 2000, 8


async def ask(server: TritonServer, name: str) -> None:
    async with grpc.aio.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        config = (await stub.ModelConfig(service_pb2.ModelConfigRequest(name=name))).config
        folder = Folder.from_config(name, config)
        for _ in range(NUM_TIMES // NUM_TOGETHER):
            infos = [ModelInfos(Calls(stub), ()) for _ in range(NUM_TOGETHER)]
            assert all(await asyncio.gather(*(each.of(folder, config) for each in infos)))


@pytest.mark.full
def test_a_model_that_was_asked_often_is_unloaded(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    """Triton 24.10 keeps a model for good after some hundred streams that are cancelled during a response."""
    make_folder(
        tmp_path / "repository",
        "decoupled",
        huggingface_model=build_tiny_checkpoint(tmp_path / "checkpoint"),
        config=DECOUPLED,
    )
    arguments = ["--model-control-mode=explicit", "--load-model=decoupled"]
    with TritonServer(tmp_path / "repository", arguments=arguments) as server:
        asyncio.run(ask(server, "decoupled"))
        request = urllib.request.Request(f"{server.http_url}/v2/repository/models/decoupled/unload", data=b"{}")
        urllib.request.urlopen(request, timeout=60).close()
        wait_until(lambda: server.models()[0].reason == "unloaded")
