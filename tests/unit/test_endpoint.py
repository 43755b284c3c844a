# SPDX-License-Identifier: Apache-2.0
"""The gateway's connection to Triton."""

import re
import subprocess
from pathlib import Path

from hf_triton.server import find_tritonserver
from hf_triton_gateway.triton.endpoint import CHANNEL_OPTIONS


def test_pings_are_as_rare_as_triton_wants(tmp_path: Path) -> None:
    """Else it ends the connection, and all calls on it, when it has sent nothing for three minutes."""
    command = [find_tritonserver(tmp_path).binary, "--help"]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    flag = r"--grpc-http2-min-recv-ping-interval-without-data .*?Default is (\d+)"
    found = re.search(flag, told.stdout + told.stderr, re.DOTALL)
    assert found
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > int(found[1])
