# SPDX-License-Identifier: Apache-2.0
"""`hf-triton check`: what is wrong with model folders, before a server starts."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hf_triton.folders.folders import is_checkpoint, is_model_folder, model_folders
from hf_triton_cli.exit_codes import UNSERVABLE
from hf_triton_cli.tables import show_table

NOISY: Final = ("torchao", "torch.utils._pytree")
"""Loggers that warn of torchao's own parts while transformers imports it."""


@click.command(epilog="Example: hf-triton check model_repository/falcon7b --json")
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, one object for each folder.")
def check(folders: Sequence[Path], as_json: bool) -> None:
    """Look at FOLDER, a model folder or a model repository, as far as possible without serving it.

    No weights are loaded and nothing is downloaded. The exit code is 5 if a folder cannot be served.
    """
    from hf_triton.folders.findings import FolderCheck

    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    checks = {folder: FolderCheck(folder) for given in folders for folder in _folders(given)}
    for each in checks.values():
        each.run()
    if as_json:
        described = [
            {"folder": str(folder), "ok": not each.has_errors, "findings": list(map(dataclasses.asdict, each.findings))}
            for folder, each in checks.items()
        ]
        click.echo(json.dumps(described, ensure_ascii=False, indent=2))
    else:
        show_table(
            [
                {"folder": folder.name, **dataclasses.asdict(finding)}
                for folder, each in checks.items()
                for finding in each.findings
            ]
        )
    if any(each.has_errors for each in checks.values()):
        sys.exit(UNSERVABLE)


def _folders(given: Path) -> list[Path]:
    folder = given.resolve()  # whose name is that of the model, `.` included
    is_one = is_model_folder(folder) or is_checkpoint(folder) or not folder.is_dir()
    return (not is_one and model_folders(folder)) or [folder]
