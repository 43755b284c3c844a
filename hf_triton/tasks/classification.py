# SPDX-License-Identifier: Apache-2.0
"""Classification of texts or images: the best labels, with scores as transformers' pipelines have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

import annotated_types

from hf_triton.errors import RequestError
from hf_triton.protocol.task_declaration import TaskOptions, TaskOutput
from hf_triton.protocol.task_requests import TaskResult
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, best_first, sigmoid, softmax

ScoreFunction = Literal["softmax", "sigmoid", "none"]
FUNCTIONS: Final[Mapping[ScoreFunction, Callable[[Floats], Floats]]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}
OUTPUTS: Final[Mapping[str, TaskOutput]] = {
    "label": TaskOutput("TYPE_STRING", "the best label, or the `top_k` best", num_dims=1),
    "score": TaskOutput("TYPE_FP32", "their scores", num_dims=1),
    "all_scores": TaskOutput(
        "TYPE_FP32", "the scores of all labels, in the model's order", num_dims=1, by_default=False
    ),
    "all_labels": TaskOutput("TYPE_STRING", "these labels", num_dims=1, by_default=False),
}


class ClassificationOptions(TaskOptions):
    """Request parameters of classification."""

    top_k: Annotated[int, annotated_types.Ge(1)] | None = None
    """How many labels to return, the best first; at most as many as the model has. By default the best one."""

    function_to_apply: ScoreFunction | None = None
    """What makes scores of logits. By default as transformers' pipeline chooses: `none` for regression, `sigmoid` if
    several labels may hold at a time or there is only one, otherwise `softmax`."""


class Classification(EncoderTask[ClassificationOptions]):
    """See `EncoderTask`; what is classified is a subclass's."""

    def check_options(self, options: ClassificationOptions) -> None:
        top_k, num_labels = options.top_k, self.config.num_labels
        if top_k is not None and top_k > num_labels:
            raise RequestError(
                "invalid_parameter", f"{param('top_k')} must be an integer >= 1 and <= {num_labels}, got {top_k}"
            )

    def decode(self, encoded: EncodedRow, options: ClassificationOptions, outputs: list[Floats]) -> TaskResult:
        """JSON is an object, or an array of them if `top_k` is given."""
        scores = self._scores(outputs[0], options.function_to_apply)
        best = best_first(scores)[: options.top_k or 1]
        labels = [self.label(index) for index in best]
        objects = [{"label": label, "score": score} for label, score in zip(labels, scores[best].tolist(), strict=True)]
        return TaskResult(
            json=objects[0] if options.top_k is None else objects,
            tensors={
                "label": labels,
                "score": scores[best],
                "all_scores": scores,
                "all_labels": [self.label(index) for index in range(len(scores))],
            },
        )

    def _scores(self, logits: Floats, function: ScoreFunction | None) -> Floats:
        problem = self.config.problem_type
        if function is None and problem == "regression":
            function = "none"
        elif function is None:
            is_multi_label = problem == "multi_label_classification" or self.config.num_labels == 1
            function = "sigmoid" if is_multi_label else "softmax"
        return FUNCTIONS[function](logits)
