# SPDX-License-Identifier: Apache-2.0
"""A chat, and a checkpoint with a chat template."""

from pathlib import Path

from transformers import AutoTokenizer

from hf_triton.testing import build_tiny_checkpoint

TEMPLATE = """{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}{{ raise_exception('no such role') }}{%- endif -%}
<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{{ 'think: ' if enable_thinking else '' }}{% endif %}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the river go?"}]


def build_chat_checkpoint(folder: Path) -> Path:
    build_tiny_checkpoint(folder, "llama", eos_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
