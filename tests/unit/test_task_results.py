# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a task of one's own: no declaration, an output of a wrong type, a result without a declared tensor."""

from pathlib import Path

import pytest

from hf_triton.errors import HfTritonError, SettingsError
from hf_triton.protocol.task_declaration import TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import TaskResult, encode_results
from hf_triton.settings import ModelSettings
from hf_triton.tasks.encoder_task import EncoderTask
from hf_triton.tasks.registry import folder_task


def test_a_task_without_a_declaration_is_refused(tmp_path: Path) -> None:
    class Similarity(EncoderTask[TaskOptions]):
        pass

    with pytest.raises(SettingsError, match=r"the task class Similarity .* has no declaration: give"):
        folder_task(Similarity, ModelSettings(huggingface_model="org/name"), tmp_path)


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
