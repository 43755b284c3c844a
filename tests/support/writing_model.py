# SPDX-License-Identifier: Apache-2.0
"""A model that writes what the prompt tells it to: `say:...` in the last message; its template tells tool calls.

As Qwen3's, the template needs a content in each message, and drops the role `developer`.
"""

CHATML = """{%- for message in messages if message.role in ('system', 'user', 'assistant', 'tool') -%}
<|im_start|>{{ message.role }}
{{ '' + message.content }}<|im_end|>
{% endfor %}{% if tools %}<tool_call></tool_call>{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}{#- </think> -#}"""
WRITING_MODEL = """
import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    "Writes what the last line of the prompt that begins with `say:` holds, and ends."

    def load(self, checkpoint):
        self.tokenizer = checkpoint.tokenizer
        return checkpoint

    def logits_processor(self):
        ids = []

        def process(token_ids, scores):
            if not ids:
                text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
                text = text.rsplit("say:", 1)[1].split("<|im_end|>")[0]
                ids.extend(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                ids.append(self.tokenizer.eos_token_id)
                process.start = len(token_ids)
            scores[:] = -1000.0
            scores[ids[min(len(token_ids) - process.start, len(ids) - 1)]] = 0.0
            return scores

        return process
"""
