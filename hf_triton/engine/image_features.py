# SPDX-License-Identifier: Apache-2.0
"""Which images have their features on the device, and until when. Knows their numbers alone, and no torch."""

from __future__ import annotations

from collections import OrderedDict

from hf_triton.engine.sequence import SequenceGroup
from hf_triton.runner.image_inputs import ImageInput


class ImageFeatures:
    """Images whose features are computed, or will be once the step that was scheduled last has begun.

    A group keeps them until it ends, as its sequences may be preempted and computed again.

    Args:
        spare_tokens: Images of as many tokens keep their features longer: the same ones may be asked for again.
    """

    def __init__(self, spare_tokens: int) -> None:
        self._spare_tokens = spare_tokens
        self._computed: set[int] = set()
        self._groups: dict[SequenceGroup, dict[int, ImageInput]] = {}  # that have not ended, and what they need
        self._spare: OrderedDict[int, int] = OrderedDict()  # what no group needs: tokens by number, the oldest first

    def has(self, group: SequenceGroup, image: ImageInput) -> bool:
        """Whether features are computed, which the group keeps then."""
        if image.number not in self._computed:
            return False
        self._keep(group, image)
        return True

    def add(self, group: SequenceGroup, image: ImageInput) -> None:
        """A step is going to compute features that a group needs."""
        self._computed.add(image.number)
        self._keep(group, image)

    def users(self, image: ImageInput) -> list[SequenceGroup]:
        """The groups that need an image and have not ended."""
        return [group for group, images in self._groups.items() if image.number in images and not group.is_finished]

    def lose(self) -> None:
        """A step has failed: images that are needed are in steps again, even if their features are kept."""
        self._computed.clear()

    def forget_ended(self) -> None:
        """Hold no group that has ended: with it go its request and its pixels."""
        if not self._groups:
            return
        for group in [group for group in self._groups if group.is_finished]:
            for number, image in self._groups.pop(group).items():
                if not any(number in images for images in self._groups.values()):
                    self._spare[number] = len(image.places)

    def take_dropped(self, *, is_idle: bool = False) -> tuple[int, ...]:
        """The numbers of images whose features are needed no more; each is named once. An idle engine spares none."""
        self.forget_ended()
        dropped: list[int] = []
        while self._spare and (is_idle or sum(self._spare.values()) > self._spare_tokens):
            dropped.append(self._spare.popitem(last=False)[0])
        self._computed.difference_update(dropped)
        return tuple(dropped)

    def _keep(self, group: SequenceGroup, image: ImageInput) -> None:
        self._groups.setdefault(group, {})[image.number] = image
        self._spare.pop(image.number, None)
