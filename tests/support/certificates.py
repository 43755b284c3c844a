# SPDX-License-Identifier: Apache-2.0
"""Certificates of made authorities, by openssl."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path


def _openssl(*arguments: object) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A certificate authority with its files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.file, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        subject = ("-subj", f"/CN=made {name}", "-addext", "keyUsage=critical,keyCertSign")
        _openssl("req", "-x509", *KEY, "-days", "30", *subject, "-keyout", self._key, "-out", self.file)

    def issue(self, name: str, *names: str, is_expired: bool = False) -> Certificate:
        """A certificate for names and addresses: `DNS:localhost`, `IP:127.0.0.1`."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(names or ('DNS:localhost', 'IP:127.0.0.1'))}\n")
        _openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        signed = ("-CA", self.file, "-CAkey", self._key, "-set_serial", "7", "-extfile", extensions)
        days = ("-days", -1 if is_expired else 30)
        _openssl("x509", "-req", "-in", request, *signed, *days, "-out", made.file)
        return made

    def lock(self, key: Path, locked: Path) -> None:
        _openssl("ec", "-aes128", "-passout", "pass:word", "-in", key, "-out", locked)

    def client(self) -> ssl.SSLContext:
        """Settings of a client that trusts this authority alone."""
        return ssl.create_default_context(cafile=str(self.file))
