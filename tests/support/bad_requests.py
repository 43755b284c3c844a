# SPDX-License-Identifier: Apache-2.0
"""Requests that must be refused, each with the statuses and the sentence to expect.

A sentence that begins with one of our codes is a pattern for all of the answer; Triton's own answers, given before
hf_triton is asked, are pinned by a phrase, so that another base image's words show up here.
"""

from collections.abc import Sequence

from tests.support.doors import (
    PLAIN,
    TYPED,
    Door,
    over_client,
    over_grpc,
    over_http,
    pack,
    prompts,
    tensor,
    to_generate,
    to_infer_inputs,
)

Case = tuple[Door, Sequence[int | str], str]

BAD_REQUEST, NO_JSON = (400,), (500, 400)
"""What Triton says to JSON that it cannot read is 500 in 24.10; it is the client's mistake all the same."""


def with_tensor(name: str, datatype: str, data: list[object], *, shape: list[int] | None = None, rows: int = 1) -> Door:
    return to_infer_inputs(
        tensor(shape=[rows, 1], data=["x"] * rows),
        tensor(name=name, datatype=datatype, shape=shape or [len(data), 1], data=data),
        model=TYPED,
    )


ONE_TEXT = ("text_input", "BYTES", [1, 1])
TENSORS: dict[str, Case] = {
    "NaN": (
        with_tensor("temperature", "FP32", [float("nan")]),
        BAD_REQUEST,
        "invalid_parameter: temperature must be a number >= 0 and <= 100, got nan",
    ),
    "too few bytes": (
        over_grpc([pack(b"x"), b"\1\2\3"], inputs=(ONE_TEXT, ("max_new_tokens", "INT64", [1, 1])), model=TYPED),
        ["INVALID_ARGUMENT"],
        "byte size mismatch for input 'max_new_tokens'",
    ),
    "one bad row": (
        with_tensor("max_new_tokens", "INT64", [3, -4, 5], rows=3),
        BAD_REQUEST,
        r"invalid_parameter: max_new_tokens must be an integer >= 1 and <= 1048576, got -4 \(row 1\)",
    ),
    "null": (to_generate({"text_input": "x", "max_new_tokens": None}, TYPED), NO_JSON, "non-signed-integer"),
}

NEITHER = "invalid_input: give one of text_input, messages, prompt_token_ids"
NO_TIMES = (
    r"invalid_parameter: return_timings needs a server of Triton 25\.02 or newer, and this one is older: leave it out"
)
NO_PROMPT = r"invalid_input: text_input holds no prompt, its shape is \[0\]"
REQUESTS: dict[str, Case] = {
    # dtype, rank, number and name of tensors
    "shape 2^62": (to_infer_inputs(tensor(shape=[2**62])), BAD_REQUEST, "expected 4611686018427387904 string|size"),
    "empty batch": (to_infer_inputs(tensor(shape=[0], data=[])), BAD_REQUEST, NO_PROMPT),
    "no input": (to_infer_inputs(), BAD_REQUEST, NEITHER),
    "times": (to_generate({"text_input": "x", "return_timings": True}), BAD_REQUEST, NO_TIMES),
    # beam search, of a model in the continuous engine
    # MLServer's names of the prompt
    "args and a prompt": (
        to_generate({"text_input": "x", "args": "y"}),
        BAD_REQUEST,
        "invalid_input: text_input and args are the same input: give one of them",
    ),
    # what /generate takes for a prompt
    # JSON
    "empty body": (to_generate(b""), NO_JSON, "document is empty"),
    "cut off": (to_generate(b'{"text_input": "x"'), NO_JSON, "failed to parse the request JSON"),
    "lone surrogate": (to_generate(b'{"text_input": "\\ud800"}'), NO_JSON, "surrogate"),
    "depth 100,000": (to_generate(b"[" * 100_000 + b"]" * 100_000), NO_JSON, "non-object|depth|nest"),
    "depth 100,000, inside": (
        to_generate(b'{"text_input": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        NO_JSON,
        "parameter 'a' has invalid type|depth|nest",
    ),
    # bytes that are no UTF-8
    "no UTF-8": (
        to_generate(b'{"text_input": "a\xff"}'),
        BAD_REQUEST,
        "invalid_input: text_input row 0 is not valid UTF-8: byte 0xff at offset 1",
    ),
    "one bad row among good ones": (
        over_client(PLAIN, {"text_input": prompts(b"good", b"good", b"\xfe", b"good")}),
        ["INVALID_ARGUMENT"],
        "invalid_input: text_input row 2 is not valid UTF-8: byte 0xfe at offset 0",
    ),
    "a long prompt as a web form, as curl -d sends it": (  # 5 MB of it overflow Triton's stack: server #5840
        over_http(
            f"/v2/models/{PLAIN}/generate",
            {"text_input": "a" * 1_000_000},
            {"Content-Type": "application/x-www-form-urlencoded"},
        ),
        BAD_REQUEST,
        r"context_exceeded: text_input row 0 has 1000000 bytes, more than .*",
    ),
    # binary framing
    # gRPC
    "gRPC: text cut off": (over_grpc([b"\5\0\0\0x"]), ["INVALID_ARGUMENT"], "incomplete string data"),
    "gRPC: 4 GB announced": (over_grpc([b"\xff\xff\xff\xffx"]), ["INVALID_ARGUMENT"], "incomplete string data"),
    "gRPC: shape 0": (over_grpc([b""], inputs=[("text_input", "BYTES", [0])]), ["INVALID_ARGUMENT"], NO_PROMPT),
    "gRPC: shape 2^62": (over_grpc(inputs=[("text_input", "BYTES", [2**62])]), ["INVALID_ARGUMENT"], "expected|size"),
    "gRPC: no input": (over_grpc([], inputs=[]), ["INVALID_ARGUMENT"], NEITHER),
    # routes
}
