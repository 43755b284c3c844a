# SPDX-License-Identifier: Apache-2.0
"""Endpoints for requests: HTTP and gRPC, JSON and bytes, also bodies that no client library makes.

A door is a request that waits for its server; what comes back is a status and a text, whatever they are.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from hf_triton.testing import TritonServer
from tests.support.client import post

PLAIN, TYPED = "plain", "typed"
"""`typed` declares every parameter as an optional input too, and batches: its tensors have shape `[batch, 1]`."""


@dataclass(frozen=True)
class Answer:
    status: int | str
    """HTTP status, or gRPC status name."""
    text: str


Door = Callable[[TritonServer], Answer]


def over_http(path: str, body: object, headers: Mapping[str, str] | None = None, method: str = "POST") -> Door:
    def door(server: TritonServer) -> Answer:
        reply = post(server, path, body, headers=headers, method=method)
        try:
            return Answer(reply.status, reply.error)
        except (ValueError, KeyError, TypeError):
            return Answer(reply.status, reply.body)

    return door


def to_generate(fields: object, model: str = PLAIN) -> Door:
    return over_http(f"/v2/models/{model}/generate", fields)


def to_infer(body: object, model: str = PLAIN) -> Door:
    return over_http(f"/v2/models/{model}/infer", body)


def tensor(**changes: object) -> dict[str, object]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]} | changes


def to_infer_inputs(*inputs: object, model: str = PLAIN, **fields: object) -> Door:
    return to_infer({"inputs": list(inputs), **fields}, model)


def to_infer_binary(*texts: bytes, length: int | None = None) -> Door:
    """`/infer` with the texts as raw bytes behind the JSON."""
    raw = pack(*texts)
    described = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)]}
    header = json.dumps({"inputs": [described | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    sent = {"Inference-Header-Content-Length": str(len(header) if length is None else length)}
    return over_http(f"/v2/models/{PLAIN}/infer", header + raw, sent)


def pack(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def over_grpc(
    raw: Sequence[bytes] = (pack(b"x"),),
    *,
    inputs: Sequence[tuple[str, str, list[int]]] = (("text_input", "BYTES", [1]),),
    texts: Sequence[bytes] = (),
    model: str = PLAIN,
    version: str = "",
    output: str | None = None,
) -> Door:
    """A gRPC request of any form, as no client library would make it."""
    message = service_pb2.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=raw)
    for name, datatype, shape in inputs:
        described = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if texts:  # to touch `contents` is to send them
            described.contents.bytes_contents.extend(texts)
    if output is not None:
        message.outputs.add(name=output)

    def door(server: TritonServer) -> Answer:
        with grpc.insecure_channel(server.grpc_url, [("grpc.max_send_message_length", -1)]) as channel:
            try:
                answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=60)
            except grpc.RpcError as error:
                return Answer(error.code().name, error.details())
        return Answer("OK", str(answer))

    return door


def over_client(model: str, tensors: Mapping[str, Any], parameters: Mapping[str, object] | None = None) -> Door:
    """gRPC by Triton's own client library."""

    def door(server: TritonServer) -> Answer:
        client = grpcclient.InferenceServerClient(server.grpc_url)
        inputs = []
        for name, array in tensors.items():
            one = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            one.set_data_from_numpy(array)
            inputs.append(one)
        try:
            answer = client.infer(model, inputs, parameters=parameters, client_timeout=60)
        except InferenceServerException as error:
            return Answer(error.status().removeprefix("StatusCode."), error.message())
        finally:
            client.close()
        return Answer("OK", str(answer.as_numpy("text_output")))

    return door


def prompts(*texts: bytes, is_batch: bool = False) -> Any:
    array = np.array(texts, dtype=np.object_)
    return array.reshape(-1, 1) if is_batch else array
