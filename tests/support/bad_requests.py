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
    to_infer,
    to_infer_binary,
    to_infer_inputs,
)

Case = tuple[Door, Sequence[int | str], str]

CONTEXT_BYTES = 16 * 256
BAD_REQUEST, NO_JSON = (400,), (500, 400)
"""What Triton says to JSON that it cannot read is 500 in 24.10; it is the client's mistake all the same."""

# --- parameters as tensors -------------------------------------------------------------------------------------------


def with_tensor(name: str, datatype: str, data: list[object], *, shape: list[int] | None = None, rows: int = 1) -> Door:
    return to_infer_inputs(
        tensor(shape=[rows, 1], data=["x"] * rows),
        tensor(name=name, datatype=datatype, shape=shape or [len(data), 1], data=data),
        model=TYPED,
    )


ONE_TEXT = ("text_input", "BYTES", [1, 1])
TENSORS: dict[str, Case] = {
    "INT32 for INT64": (
        with_tensor("max_new_tokens", "INT32", [4]),
        BAD_REQUEST,
        "'max_new_tokens' data-type is 'INT32', but model 'typed' expects 'INT64'",
    ),
    "two values for one prompt": (
        with_tensor("max_new_tokens", "INT64", [4, 5]),
        BAD_REQUEST,
        "batch size does not match other inputs",
    ),
    "NaN": (
        with_tensor("temperature", "FP32", [float("nan")]),
        BAD_REQUEST,
        "invalid_parameter: temperature must be a number >= 0 and <= 100, got nan",
    ),
    "text for a number": (with_tensor("temperature", "FP32", ["1"]), NO_JSON, "non-number"),
    "number for a boolean": (with_tensor("do_sample", "BOOL", [2]), NO_JSON, "non-boolean"),
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
    "rows with and without their prompt": (
        with_tensor("exclude_input_in_output", "BOOL", [True, False], rows=2),
        BAD_REQUEST,
        "invalid_parameter: exclude_input_in_output must be the same for all rows of a request",
    ),
    "a tensor and a parameter": (
        to_infer_inputs(
            tensor(shape=[1, 1]),
            tensor(name="max_new_tokens", datatype="INT64", shape=[1, 1], data=[4]),
            model=TYPED,
            parameters={"max_new_tokens": 3},
        ),
        BAD_REQUEST,
        "invalid_parameter: max_new_tokens is given twice, as an input and as a parameter: leave one out",
    ),
    "the same key twice": (
        to_generate(b'{"text_input": "x", "seed": 1, "seed": 2}', TYPED),
        BAD_REQUEST,
        "input 'seed' already exists",
    ),
    "null": (to_generate({"text_input": "x", "max_new_tokens": None}, TYPED), NO_JSON, "non-signed-integer"),
    "a nested list": (to_generate({"text_input": "x", "seed": [[1, 2]]}, TYPED), NO_JSON, "."),
    "larger than the batch": (
        to_infer_inputs(tensor(shape=[9, 1], data=["x"] * 9), model=TYPED),
        BAD_REQUEST,
        "batch-size must be <= 8",
    ),
    "no batch dimension": (
        to_infer_inputs(tensor(), model=TYPED),
        BAD_REQUEST,
        r"unexpected shape for input 'text_input' .* Expected \[-1,1\], got \[1\]",
    ),
}

# --- tensors and prompts ---------------------------------------------------------------------------------------------

NEITHER = "invalid_input: give one of text_input, messages, prompt_token_ids"
NO_TIMES = (
    r"invalid_parameter: return_timings needs a server of Triton 25\.02 or newer, and this one is older: leave it out"
)
NO_PROMPT = r"invalid_input: text_input holds no prompt, its shape is \[0\]"
REQUESTS: dict[str, Case] = {
    # dtype, rank, number and name of tensors
    "INT32 prompt": (
        to_infer_inputs(tensor(datatype="INT32", data=[1])),
        BAD_REQUEST,
        "data-type is 'INT32', but model 'plain' expects 'BYTES'",
    ),
    "dtype that is none": (to_infer_inputs(tensor(datatype="STRINGS")), BAD_REQUEST, "invalid datatype"),
    "rank 0": (to_infer_inputs(tensor(shape=[])), BAD_REQUEST, r"Expected \[-1\], got \[\]"),
    "shape -1": (to_infer_inputs(tensor(shape=[-1])), NO_JSON, "non-unsigned-integer"),
    "shape 2^62": (to_infer_inputs(tensor(shape=[2**62])), BAD_REQUEST, "expected 4611686018427387904 string|size"),
    "empty batch": (to_infer_inputs(tensor(shape=[0], data=[])), BAD_REQUEST, NO_PROMPT),
    "empty list": (to_generate({"text_input": []}), BAD_REQUEST, NO_PROMPT),
    "fewer texts than the shape says": (to_infer_inputs(tensor(shape=[3])), BAD_REQUEST, "expected 3 string"),
    "more texts than the shape says": (
        to_infer_inputs(tensor(data=["x", "y"])),
        BAD_REQUEST,
        "unexpected number of string elements 2",
    ),
    "number for a text": (to_infer_inputs(tensor(data=[5])), NO_JSON, "non-string as string"),
    "null for a text": (to_infer_inputs(tensor(data=None)), NO_JSON, "non-array as array"),
    "no data": (
        to_infer_inputs({"name": "text_input", "datatype": "BYTES", "shape": [1]}),
        BAD_REQUEST,
        "But no field is set",
    ),
    "no name": (to_infer_inputs({"datatype": "BYTES", "shape": [1], "data": ["x"]}), NO_JSON, "'name'"),
    "no input": (to_infer_inputs(), BAD_REQUEST, NEITHER),
    "times": (to_generate({"text_input": "x", "return_timings": True}), BAD_REQUEST, NO_TIMES),
    "times, gRPC": (
        over_client(PLAIN, {"text_input": prompts(b"x")}, {"return_timings": True}),
        ["INVALID_ARGUMENT"],
        NO_TIMES,
    ),
    # beam search, of a model in the continuous engine
    # MLServer's names of the prompt
    "args and a prompt": (
        to_generate({"text_input": "x", "args": "y"}),
        BAD_REQUEST,
        "invalid_input: text_input and args are the same input: give one of them",
    ),
    "unknown input": (to_infer_inputs(tensor(name="text")), BAD_REQUEST, "unexpected inference input 'text'"),
    "duplicate input": (to_infer_inputs(tensor(), tensor()), BAD_REQUEST, "input 'text_input' already exists"),
    "unknown output": (
        to_infer_inputs(tensor(), outputs=[{"name": "logits"}]),
        BAD_REQUEST,
        "unexpected inference output 'logits'",
    ),
    "parameters as a list": (to_infer_inputs(tensor(), parameters=[1]), NO_JSON, "non-object"),
    "parameters as a number": (to_generate({"text_input": "x", "parameters": 5}), NO_JSON, "non-object"),
    "parameters in parameters": (
        to_generate({"text_input": "x", "parameters": {"parameters": {"seed": 1}}}),
        BAD_REQUEST,
        "parameter 'parameters' has invalid type",
    ),
    "timeout -1": (to_infer_inputs(tensor(), parameters={"timeout": -1}), NO_JSON, "non-unsigned-integer"),
    "reserved parameter": (
        to_infer_inputs(tensor(), parameters={"triton_x": 1}),
        BAD_REQUEST,
        "parameter keys starting with 'triton_' are reserved",
    ),
    "id as a number": (to_generate({"text_input": "x", "id": 42}), NO_JSON, "'id'"),
    # what /generate takes for a prompt
    "generate: number": (to_generate({"text_input": 5}), NO_JSON, "non-string as string"),
    "generate: nested list": (to_generate({"text_input": [["x", "y"]]}), NO_JSON, "."),
    "generate: no prompt": (to_generate({}), BAD_REQUEST, NEITHER),
    # JSON
    "empty body": (to_generate(b""), NO_JSON, "document is empty"),
    "empty body, infer": (to_infer(b""), BAD_REQUEST, "Raw request must only have 1 input"),
    "array": (to_generate(b"[]"), NO_JSON, "non-object"),
    "array, infer": (to_infer(b"[]"), NO_JSON, "'inputs'"),
    "cut off": (to_generate(b'{"text_input": "x"'), NO_JSON, "failed to parse the request JSON"),
    "lone surrogate": (to_generate(b'{"text_input": "\\ud800"}'), NO_JSON, "surrogate"),
    "1e999": (to_generate(b'{"text_input": "x", "temperature": 1e999}'), NO_JSON, "Number too big"),
    "depth 100,000": (to_generate(b"[" * 100_000 + b"]" * 100_000), NO_JSON, "non-object|depth|nest"),
    "depth 100,000, inside": (
        to_generate(b'{"text_input": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        NO_JSON,
        "parameter 'a' has invalid type|depth|nest",
    ),
    "prompt twice": (
        to_generate(b'{"text_input": "x", "text_input": "y"}'),
        BAD_REQUEST,
        "input 'text_input' already exists",
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
    "one long row among good ones": (
        over_client(PLAIN, {"text_input": prompts(b"good", b"a" * (CONTEXT_BYTES + 1))}),
        ["INVALID_ARGUMENT"],
        r"context_exceeded: text_input row 1 has 4097 bytes, more than the 4096 that are accepted "
        r"\(setting max_prompt_bytes\)",
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
    "JSON length beyond the body": (to_infer_binary(b"x", length=10_000), BAD_REQUEST, "."),
    # gRPC
    "gRPC: no data": (over_grpc([]), ["INVALID_ARGUMENT"], "unable to find data for input tensor 'text_input'"),
    "gRPC: data in both places": (over_grpc(texts=[b"x"]), ["INVALID_ARGUMENT"], "contents field must not be"),
    "gRPC: text cut off": (over_grpc([b"\5\0\0\0x"]), ["INVALID_ARGUMENT"], "incomplete string data"),
    "gRPC: 4 GB announced": (over_grpc([b"\xff\xff\xff\xffx"]), ["INVALID_ARGUMENT"], "incomplete string data"),
    "gRPC: two texts for one": (over_grpc([pack(b"x", b"y")]), ["INVALID_ARGUMENT"], "unexpected number of string"),
    "gRPC: shape -1": (over_grpc(inputs=[("text_input", "BYTES", [-1])]), ["INVALID_ARGUMENT"], "dimensions|shape"),
    "gRPC: shape 0": (over_grpc([b""], inputs=[("text_input", "BYTES", [0])]), ["INVALID_ARGUMENT"], NO_PROMPT),
    "gRPC: shape 2^62": (over_grpc(inputs=[("text_input", "BYTES", [2**62])]), ["INVALID_ARGUMENT"], "expected|size"),
    "gRPC: dtype that is none": (over_grpc(inputs=[("text_input", "S", [1])]), ["INVALID_ARGUMENT"], "expects 'BYTES'"),
    "gRPC: no input": (over_grpc([], inputs=[]), ["INVALID_ARGUMENT"], NEITHER),
    "gRPC: unknown input": (
        over_grpc(inputs=[("text", "BYTES", [1])]),
        ["INVALID_ARGUMENT"],
        "unexpected inference input 'text'",
    ),
    "gRPC: unknown output": (over_grpc(output="logits"), ["INVALID_ARGUMENT"], "unexpected inference output 'logits'"),
    "gRPC: unknown model": (over_grpc(model="nobody"), ["NOT_FOUND"], "unknown model: 'nobody'"),
    "gRPC: version that is none": (over_grpc(version="abc"), ["INVALID_ARGUMENT"], "version"),
    # routes
    "GET generate": (over_http(f"/v2/models/{PLAIN}/generate", b"", method="GET"), [405], "Method Not Allowed"),
    "unknown model": (to_generate({"text_input": "x"}, "nobody"), [404], "unknown model: 'nobody'"),
    "unknown version": (to_generate({"text_input": "x"}, f"{PLAIN}/versions/2"), [404], "version 2 is not found"),
    "a path for a model": (to_generate({"text_input": "x"}, "..%2f..%2fetc"), [404, 400], "."),
}
