# SPDX-License-Identifier: Apache-2.0
"""A reply that keeps what it receives."""

import threading
from collections.abc import Callable

from hf_triton.errors import HfTritonError
from hf_triton.protocol.responses import GeneratedOutput


class Collector:
    """Keeps the deltas and the result."""

    def __init__(self) -> None:
        self.num_texts: list[int] = []
        self.pieces: list[tuple[int, str]] = []
        self.results: list[list[GeneratedOutput] | HfTritonError] = []
        self.is_finished = threading.Event()
        self.takes_long: bool | None = None

    def start(self, num_texts: int) -> None:
        self.num_texts.append(num_texts)

    def add(self, text: int, piece: str) -> None:
        self.pieces.append((text, piece))

    def finish(self, make_texts: Callable[[], list[GeneratedOutput]], *, takes_long: bool) -> None:
        self.takes_long = takes_long
        try:
            self.results.append(make_texts())
        except HfTritonError as error:
            self.results.append(error)
        self.is_finished.set()

    def refuse(self, error: HfTritonError) -> None:
        self.results.append(error)
        self.is_finished.set()
