# SPDX-License-Identifier: Apache-2.0
"""A folder's `1/model.py` whose model takes the time of a real one."""


def slow_model(step_s: float) -> str:
    """The text of it: every forward of a tiny Llama takes `step_s` longer, from the end of loading on."""
    return f"""
import time

import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def _start(self, settings, args):
        import torch

        def nap(module, inputs):
            if type(module).__name__ == "LlamaForCausalLM":
                time.sleep({step_s})

        super()._start(settings, args)
        torch.nn.modules.module.register_module_forward_pre_hook(nap)
"""


DECOUPLED = "model_transaction_policy { decoupled: true }"
STEP_S = 0.1
SLOW_MODEL = slow_model(STEP_S)
