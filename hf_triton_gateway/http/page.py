# SPDX-License-Identifier: Apache-2.0
"""Serve the chat page: `GET /`, and its files under `/page`. What the page asks, it asks of /v1 like any client."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER: Final = Path(__file__).with_name("page")
HEADERS: Final = {
    "Cache-Control": "no-cache",  # asked for again each time, answered 304: an updated gateway shows its own page
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """Static files that may load nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def mount_page(app: FastAPI) -> None:
    """Add the page to a gateway. Its paths are no part of the gateway's OpenAPI document, and need no API key."""
    files = PageFiles(directory=FOLDER)

    async def get_page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.add_route("/", get_page, include_in_schema=False)
    app.mount("/page", files, name="page")
