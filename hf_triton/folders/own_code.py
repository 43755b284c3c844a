# SPDX-License-Identifier: Apache-2.0
"""Imports a folder's 1/model.py as Triton's process would, without Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hf_triton.errors import SettingsError
from hf_triton.folders.folders import model_file, newest_version


def own_class(folder: Path) -> Any:
    """The class of 1/model.py; raises LoadError if it cannot be imported, is none of ours, or has a wrong hook."""
    from hf_triton import StreamDoor, TritonPythonModel
    from hf_triton.tasks.checked_hooks import check_hooks

    version = newest_version(folder)
    file = model_file(version)
    place = f"{version.name}/{file.name}"
    spec = importlib.util.spec_from_file_location(f"hf_triton_checked_{folder.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(version))
    before = set(sys.modules)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the command's own
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code
        raise SettingsError(f"{place} cannot be imported ({type(error).__name__}: {error})") from None
    finally:
        sys.path.remove(str(version))
        for name in set(sys.modules) - before:  # another folder may have a module of the same name
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{version}{os.sep}"):
                del sys.modules[name]
    own = getattr(module, "TritonPythonModel", None)
    if not (isinstance(own, type) and issubclass(own, TritonPythonModel | StreamDoor)):
        raise SettingsError(f"{place} has no class TritonPythonModel that is a subclass of hf_triton.TritonPythonModel")
    if issubclass(own, TritonPythonModel):
        check_hooks(own)
    return own
