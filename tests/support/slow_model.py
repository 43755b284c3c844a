# SPDX-License-Identifier: Apache-2.0
"""A `1/model.py` whose tiny model is as slow as a real one."""


def slow_model(step_s: float) -> str:
    """Source of a `1/model.py` whose forward takes `step_s` seconds longer once the model is loaded."""
    return f"""
import time

import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def initialize(self, args):
        import torch

        def nap(module, inputs):
            if type(module).__name__ == "LlamaForCausalLM":
                time.sleep({step_s})

        super().initialize(args)
        torch.nn.modules.module.register_module_forward_pre_hook(nap)
"""


DECOUPLED = "model_transaction_policy { decoupled: true }"
STEP_S = 0.1
SLOW_MODEL = slow_model(STEP_S)
