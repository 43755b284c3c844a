# SPDX-License-Identifier: Apache-2.0
import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    """Adds nothing: config.pbtxt names the checkpoint, hf_triton/model.py does the rest."""
