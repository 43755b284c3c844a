# SPDX-License-Identifier: Apache-2.0
import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    """Nothing of its own: config.pbtxt says which checkpoint, hf_triton/model.py does the rest."""
