# SPDX-License-Identifier: Apache-2.0
"""LiteLLM's embedding and rerank: prints what came back. Arguments: the gateway's address, and a request in JSON."""

import json
import sys
from typing import Any

import litellm

address, asked = sys.argv[1], json.loads(sys.argv[2])
where: dict[str, Any] = {"api_key": "none", "num_retries": 0, "timeout": 60}
vectors = litellm.embedding("openai/minilm", asked["texts"], api_base=f"{address}/v1", **where)
ranked = litellm.rerank(
    "hosted_vllm/reranker", asked["query"], asked["documents"], api_base=address, return_documents=True, **where
)
print(json.dumps({"embeddings": [each["embedding"] for each in vectors.data], "results": ranked.results}))
