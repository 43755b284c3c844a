# SPDX-License-Identifier: Apache-2.0
"""A model that writes what its prompt tells it to: `say:TEXT` in the last message, or `say:@FILE`, a script of turns.

Its template tells tool calls, in Qwen's form. As Qwen3's, it needs a content in each message, and drops the role
`developer`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from hf_triton.testing import build_tiny_checkpoint
from tests.support.paths import ROOT

CHATML = """{%- for message in messages if message.role in ('system', 'user', 'assistant', 'tool') -%}
<|im_start|>{{ message.role }}
{{ '' + message.content }}<|im_end|>
{% endfor %}{% if tools %}<tool_call></tool_call>{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}{#- </think> -#}"""
RESULTS: Final = "[RESULTS]"
"""In a turn of a script: what the tools answered to the turn before, in the order in which the model reads it."""
WRITING_MODEL = r"""
import json
import re

import hf_triton


def told(prompt):
    "What the last `say:` of a prompt tells: a text, or that of the script's turn which has come."
    text = prompt.rsplit("say:", 1)[1]
    script = re.match(r"@([\w./-]+[.]json)", text)
    if script is None:
        return text.split("<|im_end|>")[0]
    with open(script[1], encoding="utf-8") as file:
        turns = json.load(file)
    *earlier, _ = text.split("<|im_start|>assistant\n")
    results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", earlier[-1], re.DOTALL)
    return turns[min(len(earlier), len(turns)) - 1].replace("[RESULTS]", " ".join(results))


class TritonPythonModel(hf_triton.TritonPythonModel):
    "Writes what it is told to, and ends."

    def load(self, checkpoint):
        self.tokenizer = checkpoint.tokenizer
        return checkpoint

    def logits_processor(self):
        ids = []

        def process(token_ids, scores):
            if not ids:
                text = told(self.tokenizer.decode(token_ids, skip_special_tokens=False))
                ids.extend(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                ids.append(self.tokenizer.eos_token_id)
                process.start = len(token_ids)
            scores[:] = -1000.0
            scores[ids[min(len(token_ids) - process.start, len(ids) - 1)]] = 0.0
            return scores

        return process
"""


def build_writing_checkpoint(folder: Path, vocab_size: int = 8192, **overrides: Any) -> Path:
    """A tiny checkpoint for the model, whose tokenizer was trained on the documents: prompts of agents are long."""
    build_tiny_checkpoint(folder, vocab_size=vocab_size, chat_template=CHATML, **overrides)
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.train_new_from_iterator(texts, vocab_size).save_pretrained(folder)
    return folder


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def write_script(file: Path, turns: Sequence[str], thought: str = "") -> str:
    """Write a script, whose turns begin with a thought, and give the message that has the model follow it."""
    file.write_text(json.dumps([f"{thought}</think>{turn}" for turn in turns]), encoding="utf-8")
    return f"say:@{file}"
