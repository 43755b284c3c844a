# SPDX-License-Identifier: Apache-2.0
"""A conversation's requests: images of `/image` and `generate --image`, and one that the command's end cuts off."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from hf_triton.errors import RequestError
from hf_triton_cli.client.chat import exit_at_sigterm
from hf_triton_cli.client.image_files import MAX_MB, read_image_file
from hf_triton_cli.client.session import Session
from hf_triton_cli.exit_codes import TERMINATED
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.triton.triton_messages import Folder, Generation, infer_request

PNG, JPEG, WEBP, GIF = b"\x89PNG\r\n\x1a\n1", b"\xff\xd8\xff2", b"RIFF\n\0\0\0WEBP3", b"GIF89a4"


class Server:
    """A server that answers each message with its number, or refuses it, and keeps what it was asked."""

    def __init__(self, images: str) -> None:
        info = SimpleNamespace(images=images)
        self.model = SimpleNamespace(name="eyes", door="eyes", folder=SimpleNamespace(info=info))
        self.asked: list[Any] = []
        self.refusal: Exception | None = None
        self.begun: Callable[[], object] | None = None
        self.ends: list[str] = []

    def models(self) -> Server:
        return self

    async def choose(self, models: Server, name: str | None) -> SimpleNamespace:
        if name == "slow":
            await self.stand_still()
        return self.model

    async def stand_still(self) -> None:
        assert self.begun
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.begun)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ends.append("request")

    async def stream(self, generation: Generation) -> AsyncIterator[dict[str, list[Any]]]:
        self.asked.append(json.loads(json.dumps(generation.messages)))
        self.names = generation.names
        if self.refusal:
            raise self.refusal
        if self.begun:
            await self.stand_still()
        yield {"message": [json.dumps({"content": f"{len(self.asked)}."})]}

    async def close(self) -> None:
        self.ends.append("connection")


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def talk(runner: asyncio.Runner, images: str = "continuous") -> tuple[Session, Server]:
    server: Any = Server(images)
    session = Session(server, runner, {}, None)
    session.open("eyes")
    return session, server


@pytest.mark.parametrize("command", ["Hello", "/model slow"])
def test_sigterm_ends_the_request_before_its_connection(runner: asyncio.Runner, command: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    session, server = talk(runner)
    server.begun = partial(signal.raise_signal, signal.SIGTERM)
    try:
        exit_at_sigterm()
        with pytest.raises(SystemExit) as ended:
            session.handle(command)
    finally:
        signal.signal(signal.SIGTERM, before)
        session.close()
    assert ended.value.code == TERMINATED
    assert server.ends == ["request", "connection"]


def part(kind: str, data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def test_images_go_with_the_next_message_and_stay_in_the_conversation(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "a cat.png").write_bytes(PNG)
    (tmp_path / "b").write_bytes(JPEG)
    session, server = talk(runner)
    for typed in (f"/image '{tmp_path}/a cat.png'", f"/image {tmp_path}/b", "Which?", "Why?"):
        assert session.handle(typed)
        if typed == "Which?":
            assert [server.names.words(f"messages[0].content[{place}]") for place in (0, 1)] == ["image 1", "image 2"]
    assert server.names.words("messages[0].content[1]") == "an image of an earlier message"
    first = [part("png", PNG), part("jpeg", JPEG), {"type": "text", "text": "Which?"}]
    assert [message["content"] for message in server.asked[1]] == [first, "1.", "Why?"]


def test_images_that_are_not_answered_are_forgotten(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(WEBP)
    session, server = talk(runner)
    for typed in (f"/image {tmp_path}/a.webp", "/image", "None?", f"/image {tmp_path}/a.webp", "/reset", "None?"):
        session.handle(typed)
    session.handle(f"/image {tmp_path}/a.webp")
    server.refusal = RequestError("invalid_input", "image 1 is damaged")
    with pytest.raises(RequestError):
        session.handle("Which?")
    server.refusal = None
    session.handle("And now?")
    assert [message["content"] for message in server.asked[-1]] == ["None?", "2.", "And now?"]


def test_a_model_without_eyes_takes_no_image(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(GIF)
    session, server = talk(runner, "no")
    with pytest.raises(click.UsageError, match="eyes takes no images: /model goes on with another one"):
        session.handle(f"/image {tmp_path}/a.gif")
    session.handle("Hello")
    assert [message["content"] for message in server.asked[0]] == ["Hello"]


def test_files_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").touch()
    with (tmp_path / "large").open("wb") as file:
        file.write(PNG)
        file.truncate(MAX_MB * 10**6 + 1)
    sentences = {
        "nowhere.png": "cannot be read: No such file or directory",
        "": "cannot be read: Is a directory",
        "zero\0byte": "cannot be read: ",
        "text": "is no file of PNG, JPEG, WebP or GIF",
        "empty": "is no file of PNG, JPEG, WebP or GIF",
        "large": f"has more than the {MAX_MB} MB that are sent: make it smaller",
    }
    for name, sentence in sentences.items():
        with pytest.raises(click.UsageError, match=f"^{tmp_path}/?.* ?{sentence}"):
            read_image_file(f"{tmp_path}/{name}" if name else str(tmp_path))


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, [2]), (8, [1, 2])])
def test_images_beside_a_prompt_are_an_input(max_batch_size: int, shape: list[int]) -> None:
    folder = Folder("eyes", max_batch_size, False, frozenset({"text_input", "image"}), frozenset({"text_output"}), {})
    generation = Generation("eyes", "1", {}, {}, prompts=["<image> or <image>?"], images=[PNG, GIF])
    message = infer_request(folder, generation, is_stream=False)
    [_, image] = message.inputs
    assert (image.name, image.datatype, list(image.shape)) == ("image", "BYTES", shape)
    assert message.raw_input_contents[1] == b"".join(len(data).to_bytes(4, "little") + data for data in (PNG, GIF))
    blind = Folder("blind", 0, False, frozenset({"text_input"}), frozenset({"text_output"}), {})
    with pytest.raises(ApiError, match="the model 'blind' takes no images"):
        infer_request(blind, generation, is_stream=False)
