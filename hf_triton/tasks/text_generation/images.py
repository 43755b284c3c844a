# SPDX-License-Identifier: Apache-2.0
"""Prepares the images of a prompt by transformers' own processor. Knows no engine and no chat template.

The processor gets the prompt's text with a placeholder for each image, and all of the images at once, as for
`generate`: its tokens and arrays are the prompt's. Each of several images is prepared alone too, which tells how many
tokens it takes and what the vision tower is given for it, in whichever prompt it stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.errors import CheckpointError, RequestError, UnavailableError
from hf_triton.runner.budget import FreeMemory, size_words
from hf_triton.runner.image_inputs import Arrays, ImageInput, ImageSample, PromptImages
from hf_triton.sentence import plain
from hf_triton.settings import ModelSettings
from hf_triton.tasks.images import read_image, read_size

TEXT_NAMES: Final = "input_ids", "attention_mask"
"""What a processor makes of a prompt's text."""
MAX_REASON: Final = 300  # characters of a processor's own message
BYTES_PER_PIXEL: Final = 3 + 4 * 3
"""What an image takes while it is prepared: its colours as bytes, and as float32."""
MEMORY_PART: Final = 4
"""One part in so many of the memory that is free at load may be held by images, and half as much by their files."""
SAMPLE_SIZES: Final = (64, 48), (40, 72)


class ImagePreparer:
    """Prepares prompts with images. May be used from several threads.

    Args:
        processor: transformers' own.
        model: Only asked, never computed with.
        settings: The limits of images.
        context_length: In tokens.

    Raises:
        CheckpointError: The model does not tell where its images stand.
    """

    def __init__(self, processor: Any, model: Any, settings: ModelSettings, context_length: int) -> None:
        self._processor = processor
        self._settings = settings
        self._context_length = context_length
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        """What stands in a text for an image; empty: it is not known."""
        self._token_id: int | None = getattr(model.config, "image_token_id", None)
        if self._token_id is None:
            raise CheckpointError("unsupported_model", "its config does not tell the token of its images")
        token: object = processor.tokenizer.convert_ids_to_tokens(self._token_id)
        self._token = token if isinstance(token, str) else ""
        base = model.base_model
        tower = getattr(base, "get_image_features", None)
        self._tower_names = None if tower is None else _argument_names(tower)
        self._generate_names = _argument_names(model.forward)
        self._get_positions = getattr(base, "get_rope_index", None)
        names = () if self._get_positions is None else _argument_names(self._get_positions)
        self._options = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in names else {}
        self._least_bytes = 0  # of any image, once it is prepared: a processor may enlarge it, and cut it into tiles
        self._memory = HeldMemory()
        self._files = HeldMemory(self._memory.limit // 2)

    def hold_files(self, files: Sequence[bytes], holder: object) -> None:
        """Count files as long as what holds them lives: many requests may wait.

        Raises:
            RequestError: They are more than there may be at all.
            UnavailableError: They are more than those of other requests leave.
        """
        self._files.take(sum(map(len, files)), holder)

    def prepare(
        self,
        text: str,
        files: Sequence[bytes],
        names: Sequence[str],
        *,
        adds_special_tokens: bool = False,
        salt: str = "",
    ) -> tuple[list[int], PromptImages]:
        """A prompt's tokens and its images.

        Args:
            text: With a placeholder for each image.
            files: Image files, in the order of the placeholders.
            names: What sentences call them.
            adds_special_tokens: Whether to add the tokenizer's special tokens; a chat template has written them.
            salt: Equal images of other salts have other digests, so that nobody can tell that they were seen before.

        Raises:
            RequestError: A file cannot be read, or the images are too large or take too many tokens.
            UnavailableError: The images of other requests take the memory.
        """
        most, named = self._settings.max_image_pixels, list(zip(files, names, strict=True))
        sizes = [read_size(file, most, name) for file, name in named]
        self._check_tokens(sizes)
        bytes_of = [max(BYTES_PER_PIXEL * width * height, self._least_bytes) for width, height in sizes]
        with self._memory.hold(sum(bytes_of)):
            images = [read_image(file, most, name) for file, name in named]
            ids, prepared = self._prepare(text, images, adds_special_tokens=adds_special_tokens)
        prepared = replace(prepared, images=tuple(_salted(image, salt) for image in prepared.images))
        self._memory.keep(prepared)
        return ids, prepared

    def check_text(self, text: str, about: str) -> None:
        """Refuse a text that has the token of images beside its placeholders, where that is another word.

        Args:
            text: With the placeholders.
            about: What sentences call it.
        """
        if self.placeholder and self._token and self._token in text.replace(self.placeholder, " "):
            raise RequestError(
                "invalid_input",
                f"{about} must not have the text {self._token}, which stands for an image of this model",
            )

    def sample(self, texts: Sequence[str]) -> ImageSample:
        """A prompt of two images that differ; of the texts, the first that the processor takes."""
        from PIL import Image

        colours = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
        images = [Image.fromarray(each).resize(size) for each, size in zip(colours, SAMPLE_SIZES, strict=True)]
        for text in texts:
            try:
                sample = ImageSample(*self._prepare(text, images, adds_special_tokens=False))
            except RequestError:
                if text is texts[-1]:
                    raise
            else:  # they are prepared together, and each alone
                self._least_bytes = sum(array.nbytes for array in sample.images.arguments.values())
                return sample
        raise CheckpointError("unsupported_model", "no text is known that its processor takes beside images")

    def _check_tokens(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse images that cannot fit the context whichever way they are turned, before they are decoded."""
        try:
            turned = [(height, width) for width, height in sizes]
            counted = [self._processor._get_num_multimodal_tokens(image_sizes=each) for each in (turned, list(sizes))]
            num_tokens = sum(map(min, *(each.num_image_tokens for each in counted)))
        except Exception:  # few processors have it, and not for all settings
            return
        if num_tokens >= self._context_length:
            raise RequestError(
                "context_exceeded",
                f"the images take {num_tokens} tokens, and the context of {self._context_length} must hold them, the "
                "text and at least one new token: send fewer or smaller ones",
                sizes={"tokens": num_tokens, "limit": self._context_length - 1},
            )

    def _prepare(
        self, text: str, images: Sequence[Any], *, adds_special_tokens: bool
    ) -> tuple[list[int], PromptImages]:
        arrays = self._process(text, images, adds_special_tokens=adds_special_tokens)
        ids: list[int] = arrays["input_ids"][0].tolist()
        places = np.flatnonzero(arrays["input_ids"][0] == self._token_id)
        if not len(places):
            raise RequestError(
                "invalid_input",
                f"the prompt has no place for its images: write {self.placeholder or 'the placeholder'} for each",
            )
        given = {
            name: value for name, value in arrays.items() if name not in TEXT_NAMES and name in self._generate_names
        }
        return ids, PromptImages(self._inputs(images, arrays, places), given, self._positions(arrays))

    def _process(self, text: str, images: Sequence[Any], *, adds_special_tokens: bool) -> Arrays:
        """What the processor makes of one text and its images, by name."""
        import torch

        try:
            with torch.inference_mode():
                made = self._processor(
                    text=[text],
                    images=list(images),
                    return_tensors="pt",
                    add_special_tokens=adds_special_tokens,
                    **self._options,
                )
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # it may refuse anything, in its own words
            reason = plain(" ".join(str(error).split())[:MAX_REASON])
            raise RequestError(
                "invalid_input", f"the model's processor refuses the images with this text ({reason})"
            ) from None
        return {name: value.numpy() for name, value in made.items() if isinstance(value, torch.Tensor)}

    def _inputs(self, images: Sequence[Any], arrays: Arrays, places: npt.NDArray[np.int64]) -> tuple[ImageInput, ...]:
        """Each image by itself; all as one, if preparing them alone does not give the placeholders that they have."""
        together = self._of_tower(arrays)
        whole = (ImageInput(places, together, _digest(together)),)
        if len(images) == 1 or not self.placeholder or self._tower_names is None:
            return whole
        try:
            alone = [self._process(self.placeholder, [image], adds_special_tokens=False) for image in images]
        except RequestError:
            return whole
        counts = [int((each["input_ids"] == self._token_id).sum()) for each in alone]
        if sum(counts) != len(places) or not all(counts):
            return whole
        parts = np.split(places, np.cumsum(counts)[:-1])
        own = _shared(together, [self._of_tower(each) for each in alone])
        return tuple(ImageInput(part, each, _digest(each)) for part, each in zip(parts, own, strict=True))

    def _of_tower(self, arrays: Arrays) -> Arrays:
        names = self._tower_names
        return {
            name: value
            for name, value in arrays.items()
            if (name in names if names is not None else name not in TEXT_NAMES)
        }

    def _positions(self, arrays: Arrays) -> npt.NDArray[np.int64] | None:
        """`[axes, tokens]`, by the model's own rule."""
        if self._get_positions is None:
            return None
        import torch

        names = _argument_names(self._get_positions)
        known = {name: torch.from_numpy(value) for name, value in arrays.items() if name in names}
        try:
            positions, _ = self._get_positions(**known)
        except Exception:  # it takes images side by side for one
            raise RequestError(
                "invalid_input", "the model finds no positions for these images: write some text between them"
            ) from None
        array: npt.NDArray[np.int64] = positions[:, 0].numpy()
        return array


class HeldMemory:
    """Bounds the memory of images in preparation and of what is kept: prepared ones, or files."""

    def __init__(self, limit: int | None = None) -> None:
        import torch

        self.limit = FreeMemory().of(torch.device("cpu")) // MEMORY_PART if limit is None else limit
        self._preparing = 0
        self._kept: dict[weakref.ref[Any], int] = {}  # its holders may end in any thread, so it is read in one go
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return self._preparing + sum(list(self._kept.values()))

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Hold memory inside a `with`.

        Raises:
            RequestError: It is more than there may be at all.
            UnavailableError: It is more than others leave.
        """
        with self._lock:
            self._check(num_bytes)
            self._preparing += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= num_bytes

    def take(self, num_bytes: int, holder: object) -> None:
        """Hold memory as long as its holder lives; errors as `hold` has them."""
        with self._lock:
            self._check(num_bytes)
            self._kept[weakref.ref(holder, self._forget)] = num_bytes

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.limit:
            raise RequestError(
                "invalid_input",
                f"the images take {size_words(num_bytes)} of memory, more than the {size_words(self.limit)} that they "
                "may take here: send fewer or smaller ones",
            )
        held = self._held()
        if held + num_bytes > self.limit:
            raise UnavailableError(
                "queue_full",
                f"the images of other requests take {size_words(held)} of the {size_words(self.limit)} of memory "
                "that images may take: send the request again later",
            )

    def _forget(self, holder: weakref.ref[Any]) -> None:
        self._kept.pop(holder, None)

    def keep(self, prepared: PromptImages) -> None:
        """Count the arrays of a prompt as long as it lives."""
        together = list(prepared.arguments.values())
        apart = (
            array
            for image in prepared.images
            for array in image.arguments.values()
            if not any(np.may_share_memory(array, each) for each in together)
        )
        num_bytes = sum(array.nbytes for array in (*together, *apart))
        with self._lock:
            self._kept[weakref.ref(prepared, self._forget)] = num_bytes


def _argument_names(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _shared(together: Arrays, alone: Sequence[Arrays]) -> list[Arrays]:
    """The arrays of each image; slices of those of all together, where these are put behind each other."""
    made: list[dict[str, npt.NDArray[Any]]] = [dict(each) for each in alone]
    for name, array in together.items():
        own = [each.get(name) for each in alone]
        lengths = [len(each) for each in own if each is not None and each.shape[1:] == array.shape[1:]]
        if len(lengths) == len(alone) and sum(lengths) == len(array):
            for each, part in zip(made, np.split(array, np.cumsum(lengths)[:-1]), strict=True):
                each[name] = part
    return list(made)


def _salted(image: ImageInput, salt: str) -> ImageInput:
    return replace(image, digest=hashlib.sha256(image.digest + salt.encode(errors="surrogatepass")).digest())


def _digest(arguments: Arrays) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(arguments.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
