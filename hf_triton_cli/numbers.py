# SPDX-License-Identifier: Apache-2.0
"""Options that take several numbers: `1,4,16`, or `1 4 16` as convert_model of transformer-deploy has them."""

from __future__ import annotations

from typing import Any, Final

import click

from hf_triton.errors import clip


class Numbers(click.ParamType[list[int]]):
    """Integers >= 1 between commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in value.split(",")]
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
        if len(numbers) != len(parts) or min(numbers) < 1:
            self.fail(f"must be integers >= 1, as in 1,4,16, got {clip(value)}", param, ctx)
        return numbers


NUMBERS: Final = Numbers()


class SeveralNumbers(click.Command):
    """A command whose options of numbers also take them as words of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {name for param in self.params if param.type is NUMBERS for name in param.opts}
        joined: list[str] = []
        for word in args:
            if word.isdigit() and len(joined) > 1 and joined[-2] in names:
                joined[-1] += f",{word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)
