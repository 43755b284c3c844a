# SPDX-License-Identifier: Apache-2.0
"""Texts to a folder of an encoder, and the vectors of its answer."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_triton.testing import TritonServer
from tests.support.client import post

TOLERANCE = 1e-5


def ask(server: TritonServer, model: str, name: str, data: list[str], **body: Any) -> Any:
    """POST /infer with one BYTES tensor; the outputs by name."""
    shape = body.pop("shape", [len(data)])
    tensor = {"name": name, "datatype": "BYTES", "shape": shape, "data": data}
    reply = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor], **body})
    assert reply.status == 200, reply.body
    return {output["name"]: output for output in reply.json()["outputs"]}


def vectors_of(outputs: Any) -> npt.NDArray[np.float64]:
    (output,) = outputs.values()
    assert (output["name"], output["datatype"]) == ("embedding", "FP32")
    return np.array(output["data"]).reshape(output["shape"])
