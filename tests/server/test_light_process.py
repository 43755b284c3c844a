# SPDX-License-Identifier: Apache-2.0
"""What the process of a model imports: nothing that its folder does not ask for."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_triton.testing import TritonServer, build_tiny_encoder
from tests.support.client import generate
from tests.support.paths import ROOT

pytestmark = pytest.mark.full

HEAVY = {
    "PIL", "bitsandbytes", "numba", "onnx", "onnxruntime", "pandas", "peft", "scipy", "sentence_transformers",
    "sklearn", "soundfile", "sympy.core", "torch._dynamo.config", "torch.distributed.tensor", "torchao", "torchaudio",
    "torchvision",
}  # fmt: skip
LISTS_MODULES = """
import sys
from pathlib import Path
import hf_triton

class TritonPythonModel(hf_triton.TritonPythonModel):
    def finalize(self):
        Path(__file__).with_name("modules").write_text("\\n".join(sys.modules))
        super().finalize()
"""
ASKED = """
import sys
from pathlib import Path
from hf_triton.hub.imports import import_transformers
from hf_triton.settings import ModelSettings

settings = ModelSettings(huggingface_model="x", quantization_config={"quant_method": "torchao"})
import_transformers([Path(sys.argv[1])], settings)
from transformers.utils import is_scipy_available, is_torchao_available
assert is_torchao_available() and not is_scipy_available()
import scipy
"""

NAMES = """
import pickle
import sys
import torch
from hf_triton.hub.imports import ASKED_BY, hidden, import_transformers
from hf_triton.settings import ModelSettings

if sys.argv[1] == "lazily":
    import_transformers([], ModelSettings(huggingface_model="x"))
else:
    with hidden(ASKED_BY):
        import transformers.models
import transformers
from transformers.utils import import_utils
from transformers.models import bert
from transformers import AutoModelForCausalLM, models
assert (import_utils.create_import_structure_from_path.cache_info().misses < 9) == (sys.argv[1] == "lazily")
assert "bert.modeling_bert" in pickle.loads(pickle.dumps(models))._modules
assert transformers.LlamaForCausalLM.__module__ == "transformers.models.llama.modeling_llama"
assert transformers.LlamaTokenizerFast and not hasattr(transformers, "LlamaForNothing")
for module in transformers, models:
    assert set(module.__all__) <= set(dir(module))
    print(sorted(module.__all__), sorted(module._modules), sorted(module._class_to_module.items()))
    print(sorted((name, sorted(map(str, lacks))) for name, lacks in module._object_missing_backend.items()))
"""

COMPILES = """
import importlib.util, sys
from hf_triton.hub.imports import import_transformers
from hf_triton.settings import ModelSettings

import_transformers([], ModelSettings(huggingface_model="x"))
assert importlib.util.find_spec("sympy").origin and torch.distributed.is_available() and not "sympy.core" in sys.modules
early = sys.modules["sympy"]
{first}
assert torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
import sympy, torch._dynamo, torch._dynamo.utils as utils, torch.distributed.tensor
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    assert torch.arange(9)[torch.tensor(4)].item() == 4
assert isinstance(early.Symbol("x"), (early.Basic, sympy.Basic)) and isinstance(sympy.Integer(1), early.Basic)
assert sympy.Symbol("x") + 0 == sympy.Symbol("x") and torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
"""


@pytest.fixture(scope="module")
def served(
    make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, set[str]], str]:
    """By folder, the modules of its process after a request; and the server's log."""
    repository = tmp_path_factory.mktemp("repository")
    encoder = build_tiny_encoder(tmp_path_factory.mktemp("encoder"), "text-classification")
    folders = [
        make_folder(repository, "demo", huggingface_model=ROOT / "hf_triton" / "demo"),
        make_folder(repository, "labels", huggingface_model=encoder),
    ]
    for folder in folders:
        (folder / "1" / "model.py").write_text(LISTS_MODULES)
    with TritonServer(repository) as server:
        for folder in folders:
            assert generate(server, folder.name, "Hello").status == 200
        log = server.read_log()
    return {folder.name: set((folder / "1" / "modules").read_text().split()) for folder in folders}, log


@pytest.fixture(scope="module")
def modules(served: tuple[dict[str, set[str]], str]) -> dict[str, set[str]]:
    return served[0]


def test_the_log_tells_the_parts_of_each_start(served: tuple[dict[str, set[str]], str]) -> None:
    lines = re.findall(r"(demo|labels): started in [\d.]+ s \(([\d.]+) s of processor time\): (.*?)\"?\n", served[1])
    assert {name for name, *_ in lines} == {"demo", "labels"}
    for _, whole, listed in lines:
        parts = {name: float(seconds) for name, seconds in re.findall(r"(\w+) ([\d.]+)", listed)}
        assert {"interpreter", "files", "torch", "transformers", "tokenizer", "weights", "service"} <= parts.keys()
        assert sum(parts.values()) == pytest.approx(float(whole), abs=0.2)


@pytest.mark.parametrize("folder", ["demo", "labels"])
def test_a_process_imports_nothing_heavy_that_its_folder_does_not_ask_for(
    folder: str, modules: dict[str, set[str]]
) -> None:
    assert "transformers.modeling_utils" in modules[folder]
    assert HEAVY & modules[folder] == set()


def test_a_process_of_texts_imports_nothing_of_encoders(modules: dict[str, set[str]]) -> None:
    of_encoders = re.compile(r"hf_triton\.(encoder|hub\.sentence_(files|modules)|tasks\.(encod|embed|classif|pool))")
    assert not [name for name in modules["demo"] if of_encoders.match(name)]
    assert [name for name in modules["labels"] if of_encoders.match(name)]


def test_what_a_folder_asks_for_is_seen_and_own_code_imports_the_rest(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ASKED, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_reads_its_models_for_their_names_when_one_is_asked_for_and_finds_the_same() -> None:
    command = [sys.executable, "-W", "ignore", "-c", NAMES]
    lazily, plainly = (subprocess.run([*command, way], capture_output=True, text=True) for way in ("lazily", "plainly"))
    assert not lazily.returncode, lazily.stderr
    assert not plainly.returncode, plainly.stderr
    assert len(lazily.stdout) > 100_000
    assert lazily.stdout == plainly.stdout


@pytest.mark.parametrize(
    "first", ["import torch", "from torch._dynamo.utils import warn_once", "from sympy import Basic; Basic.args"]
)
def test_torchs_compiler_comes_when_own_code_asks_for_it(first: str) -> None:
    code = "import torch\n" + COMPILES.format(first=first)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
