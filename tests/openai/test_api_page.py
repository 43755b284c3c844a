# SPDX-License-Identifier: Apache-2.0
"""`GET /docs`: the page of the gateway's API loads nothing from another host."""

import re

import httpx

from hf_triton.server import free_ports
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread


def test_the_page_and_its_files_come_from_the_gateway() -> None:
    with GatewayThread(GatewayConfig(triton=f"127.0.0.1:{free_ports(1)[0]}", port=0)) as gateway:
        page = httpx.get(f"{gateway.url}/docs")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "img-src 'self' data:;" in page.headers["content-security-policy"]
        policy = httpx.get(gateway.url).headers["content-security-policy"]
        assert "data:" not in policy.replace("img-src 'self' data:;", "")
        files = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert len(files) == 4
        for file in [*files, "openapi.json"]:  # relative, for a gateway below a path of a proxy
            assert httpx.get(f"{gateway.url}/{file}").status_code == 200, file
