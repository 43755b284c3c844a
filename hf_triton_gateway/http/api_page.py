# SPDX-License-Identifier: Apache-2.0
"""Serve `GET /docs`: Swagger's page of the gateway's OpenAPI document, from files of a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastapi import FastAPI, Request, Response

from hf_triton_gateway.http.page import FOLDER, PageFiles


def mount_api_page(app: FastAPI) -> None:
    package = importlib.util.find_spec("fastapi_offline")
    assert package is not None
    assert package.origin is not None
    page = PageFiles(directory=FOLDER)

    async def get_page(request: Request) -> Response:
        return await page.get_response("docs.html", request.scope)

    app.add_route("/docs", get_page, include_in_schema=False)
    app.mount("/docs", PageFiles(directory=Path(package.origin).parent / "static"), name="docs")
