# SPDX-License-Identifier: Apache-2.0
"""KServe's own models know every field of deploy/kserve."""

from pathlib import Path

import pytest

from tests.support.clients import CLIENTS, has, run
from tests.support.paths import ROOT

KINDS = {"runtime.yaml": "V1alpha1ServingRuntime", "service.yaml": "V1beta1InferenceService"}
CHECK = """
import importlib.util
import re
import sys
import types

import yaml

package = types.ModuleType("kserve")  # without its server, which would ask for more packages
package.__path__ = list(importlib.util.find_spec("kserve").submodule_search_locations)
sys.modules["kserve"] = package
import kserve.models as models


def check(data, kind, place):
    if inner := re.fullmatch(r"list\\[(.*)\\]", kind):
        for number, item in enumerate(data):
            check(item, inner[1], f"{place}[{number}]")
    elif known := getattr(models, kind, None):
        names = {given: name for name, given in known.attribute_map.items()}
        for name, item in data.items():
            assert name in names, f"{place}.{name}"
            check(item, known.openapi_types[names[name]], f"{place}.{name}")


[document, *_] = yaml.safe_load_all(open(sys.argv[1]))
check(document, sys.argv[2], document["kind"])
print("known")
"""


@pytest.mark.parametrize("name", KINDS)
def test_kserve_knows_every_field(name: str, tmp_path: Path) -> None:
    python = has(CLIENTS / "frameworks" / "bin" / "python")
    done = run([str(python), "-c", CHECK, str(ROOT / "deploy" / "kserve" / name), KINDS[name]], tmp_path)
    assert done == "known\n"
