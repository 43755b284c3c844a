# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint whose tokenizer has gpt-oss's special tokens, and whose chat template leaves the channel open."""

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from transformers import AutoTokenizer

from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.testing import build_tiny_checkpoint
from hf_triton.testing.checkpoints import VOCAB_SIZE

SPECIAL: Final = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
SIZE: Final = VOCAB_SIZE + len(SPECIAL)
START, ANALYSIS, END = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|end|>"
FINAL = "<|channel|>final<|message|>"
THINKING: Final = Thinking(ANALYSIS, END, is_open=False, lead=START + FINAL, num_led=len(START))
TEMPLATE: Final = f"""{{%- for message in messages -%}}
<|im_start|>{{{{ message.role }}}}
{{{{ message.content }}}}<|im_end|>
{{% endfor %}}{{% if tools %}}{{{{ tools | length }}}}{{% endif %}}
{{%- if add_generation_prompt %}}{START}{{% endif %}}{{#- {FINAL} -#}}"""


def build_harmony_checkpoint(folder: Path, **overrides: Any) -> Path:
    build_tiny_checkpoint(folder, "llama", vocab_size=SIZE, **overrides)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [AddedToken(name, normalized=False, special=True) for name in SPECIAL]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
