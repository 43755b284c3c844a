# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a task of one's own: an output of a wrong type, and a result without a declared tensor."""

import pytest

from hf_triton.errors import HfTritonError, SettingsError
from hf_triton.protocol.task_declaration import TaskDeclaration, TaskOutput, TextInput
from hf_triton.protocol.task_requests import TaskResult, encode_results


@pytest.mark.parametrize("data_type", ["TYPE_FLOAT", "TYPE_FP64", "FP32"])
def test_an_output_of_another_type_is_refused(data_type: str) -> None:
    with pytest.raises(SettingsError, match=f"must be TYPE_STRING or TYPE_FP32 or .*, got '{data_type}'"):
        TaskOutput(data_type, "cosine")


def test_a_result_without_a_tensor_names_it() -> None:
    declaration = TaskDeclaration("similarity", (TextInput("text", "texts"),), {"score": TaskOutput("TYPE_FP32", "")})
    results = [TaskResult(0.5, {"scroe": 0.5})]
    with pytest.raises(HfTritonError, match="no tensor 'score', an output of its declaration; it has scroe"):
        encode_results(results, [3], declaration, (1,), ["score", "output"])
    assert set(encode_results(results, [3], declaration, (1,), ["output"])) == {"output"}
