# SPDX-License-Identifier: Apache-2.0
"""Images at the doors: files in the input `image`, and in the parts of messages of all APIs."""

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.image_files import LOOSE, MAX_BASE64, ImageParts, count_base64
from hf_triton.protocol.names import IMAGE, MESSAGES, PROMPT, PROMPT_TOKEN_IDS
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.requests import GenerationRequest, parse_request

PNG = b"\x89PNG\r\n\x1a\n"
CAT, DOG = PNG + b"cat", b"\xff\xd8\xffdog"
LIMITS = Limits(max_prompts=10, max_prompt_bytes=1000, max_images=3, max_image_bytes=100_000)
BLIND = replace(LIMITS, max_images=0, max_image_bytes=0)


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def uri(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{encoded(file)}"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


SEEN = {"type": "image"}
FORMS: dict[str, Any] = {
    "OpenAI's chat": {"type": "image_url", "image_url": {"url": uri(CAT), "detail": "high"}},
    "a plain string": {"type": "image_url", "image_url": uri(CAT)},
    "OpenAI's responses": {"type": "input_image", "image_url": uri(CAT), "detail": "auto", "file_id": None},
    "Anthropic's": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(CAT)}},
    "MCP's": {"type": "image", "data": encoded(CAT), "mimeType": "image/png"},
    "transformers'": {"type": "image", "image": uri(CAT)},
    "transformers' base64": {"type": "image", "base64": encoded(CAT)},
    "a field of texts that is empty": {"type": "image_url", "text": None, "image_url": {"url": uri(CAT)}},
    "another type of file": {"type": "image_url", "image_url": uri(CAT, "jpeg")},
    "lines": {"type": "image_url", "image_url": f"data:image/png;base64,{encoded(CAT)[:8]}\r\n{encoded(CAT)[8:]}"},
}


def chat_of(*messages: dict[str, Any], limits: Limits = LIMITS, files: tuple[bytes, ...] = (), **options: Any) -> Chat:
    images = ImageParts(limits.max_images, limits.max_image_bytes, files)
    return parse_chat(json.dumps(messages), options, limits.max_prompt_bytes, images)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def tensor(*elements: bytes, shape: tuple[int, ...] = (-1,)) -> Any:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


@pytest.mark.parametrize("form", FORMS)
def test_an_image_of_any_api_is_a_file(form: str) -> None:
    chat = chat_of(user(text("What is"), FORMS[form], text("this?")))
    assert chat.images == (CAT,)
    assert chat.messages == (user(text("What is"), SEEN, text("this?")),)


def test_images_stand_in_any_order_in_any_turn() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    other = {"id": "b", "type": "function", "function": {"name": "look", "arguments": {}}}
    image = {"type": "image_url", "image_url": uri(DOG, "jpeg")}
    messages: list[dict[str, Any]] = [
        user(image, FORMS["Anthropic's"]),
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "b", "content": [text("Second:"), FORMS["OpenAI's responses"]]},
        {"role": "tool", "tool_call_id": "a", "content": [image]},
        {"role": "assistant", "content": [text("A dog:"), {"type": "thinking", "thinking": "hm"}, image]},
        user(text("And"), text("now?")),
    ]
    chat = chat_of(*messages, limits=replace(LIMITS, max_images=5, max_prompt_bytes=2000))
    assert chat.images == (DOG, CAT, DOG, CAT, DOG)  # results are in the order of their calls
    places = [(0, 0), (0, 1), (3, 0), (2, 1), (4, 2)]
    assert chat.image_places == tuple(f"messages[{index}].content[{part}]" for index, part in places)
    first, second = chat.messages[2], chat.messages[3]
    assert (first["tool_call_id"], first["content"]) == ("a", [SEEN])
    assert (second["tool_call_id"], second["content"]) == ("b", [text("Second:"), SEEN])
    assert chat.messages[4] == {"role": "assistant", "content": [text("A dog:"), SEEN], "reasoning_content": "hm"}
    assert chat.messages[5] == {"role": "user", "content": "And\nnow?"}


def test_parts_without_an_image_stand_for_the_rows_of_the_input() -> None:
    messages = [user(SEEN, text("and"), FORMS["MCP's"]), user(SEEN)]
    chat = chat_of(*messages, files=(DOG, PNG))
    assert chat.images == (DOG, CAT, PNG)
    assert chat.messages == (user(SEEN, text("and"), SEEN), user(SEEN))


def test_what_a_tool_answered_and_is_not_read_is_a_note() -> None:
    address = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    sound = {"type": "input_audio", "input_audio": {}}
    lent = {"type": "input_image", "file_id": "f"}
    result = {"role": "tool", "tool_call_id": "a", "content": [address, sound, FORMS["a plain string"], lent]}
    notes = [
        "[image_url: not shown, as nothing is fetched]",
        "[input_audio: not shown, as this server does not read it]",
        "[input_image: not shown, as nothing is fetched]",
    ]
    assert chat_of(result).messages[0]["content"] == [*map(text, notes[:2]), SEEN, text(notes[2])]
    blind = chat_of(result, limits=BLIND).messages[0]["content"].split("\n")
    assert blind[0] == blind[2] == "[image_url: not shown, as this model reads text alone]"
    said = {"role": "assistant", "content": [text("Hello"), FORMS["MCP's"]]}
    assert chat_of(said, limits=BLIND).messages == ({"role": "assistant", "content": "Hello"},)


ADDRESS = "messages[0].content[0] is an address, and nothing is fetched: send the file itself, or base64 of it"
REFUSED: dict[str, tuple[list[Any], str]] = {
    "an address": ([{"type": "image_url", "image_url": {"url": "https://a.org/cat.png"}}], ADDRESS),
    "Anthropic's address": ([{"type": "image", "source": {"type": "url", "url": "http://a.org/cat.png"}}], ADDRESS),
    "a path": ([{"type": "image", "url": "file:///etc/passwd"}], ADDRESS),
    "a name of a file": ([{"type": "image", "image": "/etc/passwd"}], "messages[0].content[0] is not PNG, JPEG, WebP"),
    "a file that was sent before": ([{"type": "input_image", "file_id": "f"}], "the server keeps no files"),
    "Anthropic's file": ([{"type": "image", "source": {"type": "file", "file_id": "f"}}], "the server keeps no files"),
    "a number": ([{"type": "image_url", "image_url": {"url": 5}}], "messages[0].content[0] must be like"),
    "nothing": ([{"type": "image_url"}], "messages[0].content[0] must be like"),
    "an empty string": ([{"type": "image_url", "image_url": ""}], "messages[0].content[0] is empty"),
    "a document": ([text("a"), {"type": "image_url", "image_url": uri(b"%PDF-1.7")}], "messages[0].content[1] is not"),
    "no base64": ([{"type": "image_url", "image_url": "data:image/png;base64,@@@"}], "nor base64 of it"),
    "half a pair": ([{"type": "image_url", "image_url": "\ud800"}], "JSON"),
    "too many": ([FORMS["MCP's"]] * 4, "messages holds more than the 3 images that are accepted (setting max_images)"),
    "too large": (
        [{"type": "image_url", "image_url": uri(PNG + bytes(100_000))}],
        "messages[0].content[0] has 100008 bytes, more than the 100000 that are accepted (setting max_image_bytes)",
    ),
    "one that is not there": ([SEEN], "messages[0].content[0] holds no image: give it as"),
    "sound": ([{"type": "input_audio", "input_audio": {}}], "messages[0]: content[0] is of type 'input_audio'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_that_cannot_be_read_is_refused(case: str) -> None:
    parts, words = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        chat_of(user(*parts))
    assert str(caught.value).startswith("invalid_input: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", LOOSE)
def test_an_image_beside_a_content_is_not_dropped(name: str) -> None:
    message = {"role": "user", "content": "x", name: [uri(CAT)]}
    with pytest.raises(RequestError, match=rf"messages\[0\] has no field '{name}': an image is a part of its content"):
        chat_of(message)
    chat = chat_of(message | {name: []}, {"role": "assistant", "content": "x", name: [uri(CAT)]})
    assert not chat.images


def test_a_model_that_takes_no_images_says_so() -> None:
    huge = {"type": "image_url", "image_url": uri(PNG + bytes(3_000_000))}
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[1\] is an image, and this model reads text alone"):
        chat_of({"role": "user", "content": "x"}, user(text("a"), huge), limits=BLIND)


def test_a_model_says_why_it_takes_none() -> None:
    why = replace(BLIND, image_obstacle="the setting max_images is 0")
    with pytest.raises(RequestError, match=r"reads text alone \(the setting max_images is 0\): leave it out"):
        parse_request({MESSAGES: tensor(json.dumps([user(FORMS["MCP's"])]).encode())}, {}, why)
    with pytest.raises(RequestError, match=r"image is given, and this model reads text alone \(the setting"):
        parse_request({PROMPT: tensor(b"x"), IMAGE: tensor(CAT)}, {}, why)


def test_files_that_no_part_stands_for_are_refused() -> None:
    with pytest.raises(RequestError, match="image has 2 images, and messages 1 parts"):
        chat_of(user(SEEN, FORMS["MCP's"]), files=(CAT, DOG))


def test_only_text_is_continued() -> None:
    said = {"role": "assistant", "content": [FORMS["MCP's"]]}
    with pytest.raises(RequestError, match=r"continue_final_message continues text, but messages\[0\] holds images"):
        chat_of(said, continue_final_message=True)


def test_base64_is_no_text_of_a_prompt() -> None:
    file = PNG + bytes(75_000)
    [seen] = chat_of(user(text("x" * 800), {"type": "image_url", "image_url": uri(file)})).images
    assert seen == file
    slashes = json.dumps([user(*[{"type": "image_url", "image_url": uri(b"\xff\xd8\xff" + b"\xff" * 60_000)}] * 3)])
    images = ImageParts(3, 100_000, ())
    assert len(parse_chat(slashes.replace("/", "\\/"), {}, 1000, images).images) == 3  # as PHP writes JSON
    with pytest.raises(RequestError, match="more than the 1000 that are accepted"):
        chat_of(user(text("x " * 600), {"type": "image_url", "image_url": uri(file)}))


def test_what_is_no_string_is_text() -> None:
    assert count_base64(json.dumps([uri(bytes(3000)), "a" * 64])) == 64 + len(uri(bytes(3000)))
    for mark in ("[", "{", ",", ":", " ", "é"):
        assert count_base64(f'["{mark * 2000}"]') == count_base64(f'"a"{mark * 2000}"b"') == 0
    assert count_base64("a" * 63) == 0
    assert count_base64(f"{'a' * 64}{chr(34) * (1 << 18)}") == 64
    assert count_base64(f"{'a' * 64}{chr(34) * 30_000_000}") == 0  # which would be gigabytes of strings


def test_base64_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BASE64 == 1 << 26
    monkeypatch.setattr("hf_triton.protocol.chat_request.MAX_BASE64", 5000)
    with pytest.raises(RequestError, match=r"messages hold 80.. characters of base64, more than the 5000"):
        chat_of(user({"type": "image_url", "image_url": uri(PNG + bytes(6000))}))


def test_a_sentence_shows_nothing_of_a_file() -> None:
    assert clip({"url": uri(CAT)}) == "{'url': 'data:image/png;base64,...'}"
    assert clip([uri(bytes(9_000_000))]) == "['data:image/png;base64,...']"
    assert clip("data: 1;base64") == "'data: 1;base64'"


def parse(limits: Limits = LIMITS, parameters: dict[str, object] | None = None, **inputs: Any) -> GenerationRequest:
    return parse_request(inputs, parameters or {}, limits)


def test_files_stand_beside_a_text() -> None:
    for shape in ((-1,), (1, -1)):
        request = parse(text_input=tensor(b"x", shape=shape), image=tensor(CAT, encoded(DOG).encode(), shape=shape))
        assert (request.prompts, request.images) == (["x"], (CAT, DOG))
    assert parse(text_input=tensor(b"x"), parameters={IMAGE: uri(CAT)}).images == (CAT,)
    assert parse(text_input=tensor(b"x"), image=tensor()).images == parse(BLIND, text_input=tensor(b"x")).images == ()


def test_files_stand_beside_messages() -> None:
    messages = json.dumps([user(text("Compare"), SEEN, FORMS["MCP's"])])
    request = parse(messages=tensor(messages.encode()), image=tensor(DOG))
    [chat] = request.prompts
    assert isinstance(chat, Chat)
    assert (chat.images, request.images) == ((DOG, CAT), ())


REFUSED_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "several texts": ({PROMPT: tensor(b"x", b"y")}, "image goes with one text_input or messages: send a request"),
    "token ids": ({PROMPT_TOKEN_IDS: np.array([1])}, "image goes with one text_input or messages"),
    "a chat without parts": (
        {MESSAGES: tensor(b'{"role": "user", "content": "x"}')},
        "image has 1 images, and messages",
    ),
    "an address": ({PROMPT: tensor(b"x"), IMAGE: tensor(CAT, b"https://a.org")}, "image row 1 is an address"),
    "numbers": (
        {PROMPT: tensor(b"x"), IMAGE: np.array([1])},
        "image must be files of images, or base64 of them (BYTES)",
    ),
    "too many": ({PROMPT: tensor(b"x"), IMAGE: tensor(*[CAT] * 4)}, "image holds more than the 3 images"),
    "too large": ({PROMPT: tensor(b"x"), IMAGE: tensor(PNG + bytes(100_000))}, "image row 0 has 100008 bytes"),
    "empty": ({PROMPT: tensor(b"x"), IMAGE: tensor(b"")}, "image row 0 is empty"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_wrong_files_are_refused(case: str) -> None:
    inputs, words = REFUSED_FILES[case]
    with pytest.raises(RequestError) as caught:
        parse(**{IMAGE: tensor(CAT), **inputs})
    assert str(caught.value).startswith(f"invalid_input: {words}")


def test_files_are_refused_where_the_model_takes_none() -> None:
    with pytest.raises(
        RequestError, match="invalid_input: image is given, and this model reads text alone: leave it out"
    ):
        parse(BLIND, text_input=tensor(b"x"), image=tensor(CAT))
    with pytest.raises(RequestError, match="image is given twice"):
        parse(text_input=tensor(b"x"), image=tensor(CAT), parameters={IMAGE: "x"})
