# SPDX-License-Identifier: Apache-2.0
"""A kept result of the trial at load saves `generate`, and is believed only where the model computes the same again."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, GenerationMixin

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.runner import kept_findings, way_probe
from hf_triton.runner.kept_findings import FOLDER, find_way_again
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.way_probe import Schedule, find_way
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.deep_models import STEP_FAULTS, step_fault
from tests.support.engine import Client, check, prompts, start_engine
from tests.support.paths import ROOT

PACKED, TORCH = Way(), Way(calls_torch=True)
CONTEXT = 256


class Site:
    """A home of the Hub, and how often `generate` has run."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.home, self.num_calls, generate = root, root / "home", 0, GenerationMixin.generate
        self.home.mkdir()
        patch.setenv("HF_HOME", str(self.home))

        def count(model: Any, *given: Any, **options: Any) -> Any:
            self.num_calls += 1
            return generate(model, *given, **options)

        patch.setattr(GenerationMixin, "generate", count)

    def checkpoint(self, name: str = "llama", seed: int = 0) -> Path:
        return build_tiny_checkpoint(self.root / name, name, seed=seed, eos_token_id=None)

    def load(self, name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
        folder = self.root / name
        if not folder.exists():
            self.checkpoint(name)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def files(self) -> list[Path]:
        return sorted((self.home / FOLDER).glob("*"))

    def is_tried(self, find: Callable[[], Any]) -> bool:
        """Whether the whole trial runs."""
        before = self.num_calls
        find()
        return self.num_calls > before


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "way"), [("llama", PACKED), ("falcon", TORCH), ("gemma2", PACKED)])
def test_a_second_load_runs_no_generate(site: Site, name: str, way: Way, dtype: torch.dtype) -> None:
    first = find_way_again(site.load(name, dtype), CONTEXT)
    assert first == find_way(site.load(name, dtype), CONTEXT)
    model, before = site.load(name, dtype), site.num_calls
    again = find_way_again(model, CONTEXT)
    assert (again, again.way, site.num_calls) == (first, way, before)
    (file,) = site.files()
    assert (file.stat().st_mode & 0o777, bool(first.obstacle)) == (0o600, way == TORCH)


def test_an_engine_of_a_kept_way_gives_what_generate_gives(site: Site) -> None:
    items = [(prompt, SamplingParams(6)) for prompt in prompts(4, seed=1)]
    for is_kept in (False, True):
        model, before = site.load("falcon"), site.num_calls
        engine = start_engine(model, max_num_seqs=3, context_length=CONTEXT)
        try:
            assert isinstance(engine, ContinuousBatchingEngine)
            assert (site.num_calls == before) == is_kept
            check(model, Client(engine), items)
        finally:
            engine.close()


def test_other_weights_of_the_same_sizes_and_times_are_tried(site: Site) -> None:
    times = {path: path.stat().st_mtime_ns for path in site.checkpoint().iterdir()}
    assert site.is_tried(lambda: find_way_again(site.load(), CONTEXT))
    site.checkpoint(seed=1)
    for path, time_ns in times.items():
        os.utime(path, ns=(time_ns, time_ns))
    for is_tried in (True, False):
        assert site.is_tried(lambda: find_way_again(site.load(), CONTEXT)) == is_tried
    assert len(site.files()) == 1


def change_package(patch: pytest.MonkeyPatch, folder: Path, _: object) -> None:
    (folder / "packages" / "numba-0.dist-info").mkdir(parents=True)
    patch.syspath_prepend(folder / "packages")


def change_own_module(patch: pytest.MonkeyPatch, folder: Path, _: object) -> None:
    (folder / "runner.py").touch()
    patch.setattr(kept_findings, "__file__", str(folder / "kept_findings.py"))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path, Any], object]] = {
    "transformers": lambda patch, *_: patch.setattr(kept_findings.transformers, "__version__", "0"),
    "hf_triton": lambda patch, *_: patch.setattr(kept_findings.hf_triton, "__version__", "0"),
    "torch": lambda patch, *_: patch.setattr(kept_findings.torch, "__version__", "0"),
    "package": change_package,
    "own module": change_own_module,
    "processor": lambda patch, *_: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    "attention": lambda *given: given[2].set_attn_implementation("eager"),
    "config": lambda *given: setattr(given[2].config, "a_setting", 1),
    "generation config": lambda *given: setattr(given[2].generation_config, "top_k", 7),
    "file": lambda _, folder, __: os.utime(folder / "llama" / "config.json", (1, 1)),
    "new file": lambda _, folder, __: (folder / "llama" / "modeling.py").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_result_depends_on_names_the_file(site: Site, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = site.load()
    assert site.is_tried(lambda: find_way_again(model, CONTEXT))
    assert not site.is_tried(lambda: find_way_again(model, CONTEXT))
    CHANGES[change](monkeypatch, site.root, model)
    assert site.is_tried(lambda: find_way_again(model, CONTEXT))
    assert len(site.files()) == 2


def test_other_lengths_and_dtypes_are_tried(site: Site) -> None:
    for context_length, dtype in ((256, torch.float32), (16, torch.float32), (256, torch.bfloat16)):
        assert site.is_tried(partial(find_way_again, site.load(dtype=dtype), context_length))
    assert len(site.files()) == 3


def test_files_of_the_hubs_cache_go_by_their_digests(site: Site) -> None:
    (site.root / "blobs").mkdir()
    for path in site.checkpoint().iterdir():
        path.symlink_to(path.rename(site.root / "blobs" / f"digest-{path.name}"))
    assert site.is_tried(lambda: find_way_again(site.load(), CONTEXT))
    config = site.root / "llama" / "config.json"
    os.utime(config, (1, 1))
    assert not site.is_tried(lambda: find_way_again(site.load(), CONTEXT)), "a copied cache"
    config.unlink()
    config.symlink_to((site.root / "blobs" / "digest-config.json").rename(site.root / "blobs" / "another"))
    assert site.is_tried(lambda: find_way_again(site.load(), CONTEXT))


def with_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        kept = load(data)
        return save(kept | {"logits": change(kept["logits"]).contiguous()})

    return changed


def with_told(**changes: Any) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        kept = load(data)
        told = json.dumps(json.loads(bytes(kept["finding"].tolist())) | changes).encode()
        return save(kept | {"finding": torch.tensor([*told], dtype=torch.uint8)})

    return changed


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-5],
    "a head": lambda data: data[:20],
    "text": lambda data: b"kept",
    "a pickle": lambda data: pickle.dumps({"way": Way()}),
    "other tensors": lambda data: save({"weight": torch.zeros(2)}),
    "other rows": with_logits(lambda logits: logits[:5]),
    "fewer tokens": with_logits(lambda logits: logits[:, :1]),
    "no numbers": with_logits(lambda logits: logits * torch.nan),
    "one that is none": with_logits(lambda logits: logits.index_fill(1, torch.tensor([3]), torch.nan)),
    "zeros": with_logits(torch.zeros_like),
    "infinite": with_logits(lambda logits: logits + torch.inf),
    "apart by less than the trial allows": with_logits(lambda logits: logits + 5e-4 * logits.abs().amax()),
    "no way": with_told(way=None),
    "a way of images": with_told(way={"gathers": False, "num_axes": 3}),
    "a way that is none": with_told(way={"gathers": "yes"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_as_it_was_is_tried_and_written_anew(site: Site, damage: str) -> None:
    model = site.load()
    first = find_way_again(model, CONTEXT)
    (file,) = site.files()
    data = file.read_bytes()
    file.write_bytes(DAMAGES[damage](data))
    found = []
    assert site.is_tried(lambda: found.append(find_way_again(model, CONTEXT)))
    assert (found, site.files(), file.read_bytes()) == ([first], [file], data)


def test_another_way_than_the_one_that_was_right_is_not_believed(site: Site) -> None:
    model = site.load("falcon")
    assert find_way_again(model, CONTEXT).way == TORCH
    (file,) = site.files()
    file.write_bytes(with_told(way=asdict(PACKED))(file.read_bytes()))
    assert find_way_again(model, CONTEXT).way == TORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_way_that_is_wrong_now_is_not_believed(site: Site, fault: str, dtype: torch.dtype) -> None:
    model = site.load(dtype=dtype)
    right = find_way_again(model, CONTEXT)
    with step_fault(fault):
        assert site.is_tried(lambda: find_way_again(model, CONTEXT))
        assert find_way_again(model, CONTEXT) == find_way(model, CONTEXT) != right


@pytest.mark.parametrize("obstacle", ["there", "above", "home"])
def test_where_nothing_can_be_written_nothing_is_kept(
    site: Site, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = site.load(), site.home / FOLDER
    if obstacle == "home":
        folder = site.root / "nowhere"
        monkeypatch.setenv("HF_HOME", str(folder))
    else:
        place = folder if obstacle == "there" else folder.parent
        place.parent.mkdir(exist_ok=True)
        place.touch()
    for _ in range(2):
        assert site.is_tried(lambda: find_way_again(model, CONTEXT))
    assert folder.exists() == (obstacle == "there")


def test_a_full_disk_leaves_no_part(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    model = site.load()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        find_way_again(model, CONTEXT)
    assert not site.files()


def test_a_model_without_a_checkpoint_or_without_a_way_is_not_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    model = site.load("falcon")
    with monkeypatch.context() as patch:
        patch.setattr(way_probe, "WAYS", (PACKED,))
        assert find_way_again(model, CONTEXT).way is None
    model.config._name_or_path = ""
    assert find_way_again(model, CONTEXT).way == TORCH
    assert not site.files()


def test_a_slower_way_is_not_kept_because_a_faster_one_raised(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say, where a kernel is compiled."""
    model, run = site.load(), ModelRunner.run

    def fail(runner: ModelRunner, *given: Any) -> Any:
        if not runner.way.gathers:
            raise OSError("no space left on device")
        return run(runner, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", fail)
        assert find_way_again(model, CONTEXT).way == Way(gathers=True)
    assert not site.files()
    assert find_way_again(model, CONTEXT).way == PACKED


def test_a_device_that_is_out_of_memory_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model = site.load()
    find_way_again(model, CONTEXT)
    monkeypatch.setattr(Schedule, "compute", fail)
    with pytest.raises(torch.OutOfMemoryError):
        find_way_again(model, CONTEXT)


def test_the_oldest_files_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_findings, "MAX_FILES", 3)
    folder = site.home / FOLDER
    folder.mkdir(parents=True)
    for at in range(5):
        (folder / f"{at}.new").touch()
        os.utime(folder / f"{at}.new", (at, at))
    find_way_again(site.load(), CONTEXT)
    assert sorted(path.name for path in site.files() if path.suffix == ".new") == ["3.new", "4.new"]
    assert len(site.files()) == 3


AT_ONCE = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from hf_triton.runner.kept_findings import find_way_again
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
for _ in range(5):
    assert find_way_again(model, 256).way is not None
    for file in Path(sys.argv[2]).glob("*"):
        file.unlink(missing_ok=True)
assert find_way_again(model, 256).way is not None
"""


def test_two_processes_keep_at_once(site: Site) -> None:
    command = [sys.executable, "-c", AT_ONCE, str(site.checkpoint()), str(site.home / FOLDER)]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [each.communicate(timeout=300)[1] for each in both]
    assert [each.returncode for each in both] == [0, 0], errors
    assert {path.suffix for path in site.files()} <= {".safetensors"}
