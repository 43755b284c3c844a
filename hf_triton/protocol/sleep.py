# SPDX-License-Identifier: Apache-2.0
"""How a model is told to sleep: a request with the parameter `sleep`, answered as JSON in the output `output`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

SLEEP: Final = "sleep"
"""The parameter: true has the model sleep once no request is in flight, false wakes it."""


@dataclass(frozen=True)
class SleepAnswer:
    """What has become of a model that was told to sleep or to wake."""

    is_sleeping: bool
    """Whether it sleeps; work that arrives before it does keeps it awake."""
    seconds: float = 0.0
    """How long it took to fall asleep, without the requests before it, or to wake; 0: it slept, or was awake."""
    given_back_bytes: int = 0
    """Memory that it has given back: of the GPU, or of its process on a CPU."""

    def to_json(self) -> str:
        """The output's text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SleepAnswer:
        """Read the output's text. Another text is a `ValueError`."""
        values = json.loads(text)
        try:
            return cls(bool(values["is_sleeping"]), float(values["seconds"]), int(values["given_back_bytes"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is not what {SLEEP} answers") from error
