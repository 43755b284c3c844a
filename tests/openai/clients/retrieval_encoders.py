# SPDX-License-Identifier: Apache-2.0
"""Cohere's client, and two of TEI: prints what came back. Arguments: the address, and a request in JSON."""

import json
import sys
from typing import Any

import cohere
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

address, asked = sys.argv[1], json.loads(sys.argv[2])
texts, query, documents = asked["texts"], asked["query"], asked["documents"]
client = cohere.ClientV2(api_key="none", base_url=address)
vectors: Any = client.embed(
    model="minilm", texts=texts, input_type="search_document", embedding_types=["float", "ubinary"], truncate="END"
)
ranked = client.rerank(model="reranker", query=query, documents=documents)
nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in documents]
reranker = TextEmbeddingInference(base_url=address, top_n=len(nodes))
reranked = reranker.postprocess_nodes(nodes, query_str=query)
embedder = TextEmbeddingsInference(base_url=address, model_name="minilm")
try:
    client.rerank(model="nobody", query=query, documents=documents)
except cohere.NotFoundError as error:
    refusal = [error.status_code, error.body["message"]]
print(
    json.dumps(
        {
            "cohere": vectors.embeddings.float_,
            "hub": InferenceClient(address).feature_extraction(texts).tolist(),
            "llama_index": embedder.get_text_embedding_batch(texts),
            "ranks": {
                "cohere": [(each.index, each.relevance_score) for each in ranked.results],
                "llama_index": [(documents.index(node.text), node.score) for node in reranked],
            },
            "error": refusal,
        }
    )
)
