# SPDX-License-Identifier: Apache-2.0
"""The part of a GPU that an instance may take, read from the folders of its model repository."""

from pathlib import Path

import pytest

from hf_triton.hub.config_text import parse_config_text
from hf_triton.hub.neighbours import gpu_part
from tests.support.paths import ROOT

PYTHON = 'backend: "python"\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a folder `own`."""
    add(tmp_path, "own")
    return tmp_path


def add(repository: Path, name: str, config: str | None = "") -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    if config is not None:
        (repository / name / "config.pbtxt").write_text(PYTHON + config)


def group(fields: str) -> str:
    return f"instance_group [ {{ {fields} }} ]"


@pytest.mark.parametrize(
    ("config", "on_0", "on_1"),
    [
        ("", 1, 1),
        (None, 1, 1),
        ("this is { no config", 1, 1),
        ("instance_group: 5", 1, 1),
        (group("kind: KIND_GPU count: three"), 1, 1),
        (group("kind: KIND_CPU count: 4"), 0, 0),
        (group("kind: KIND_GPU count: 3"), 3, 3),
        (group("count: 2 gpus: [ 1 ]"), 0, 2),
        (group("kind: KIND_GPU gpus: 0 gpus: 1"), 1, 1),
        (group("kind: KIND_MODEL"), 1, 1),
        (group("kind: KIND_AUTO count: 0"), 1, 1),
        (group("kind: KIND_GPU count: 2 gpus: [ 0 ] } , { kind: KIND_CPU"), 2, 0),
        ('instance_group { count: 2 }\ninstance_group < kind : KIND_GPU; gpus: [ 1, ] > # and "more"', 2, 3),
    ],
)
def test_instances_of_another_folder_share_the_gpu(config: str | None, on_0: int, on_1: int, repository: Path) -> None:
    add(repository, "other", config)
    for gpu, count in enumerate((on_0, on_1)):
        part = gpu_part(repository / "own", gpu, None)
        assert part.fraction == pytest.approx(1 / (1 + count))
        assert not part.is_set
        assert part.reason == (
            f"instances on this GPU: other {count}, own 1" if count else "the only instance on this GPU"
        )
    assert gpu_part(repository / "own", None, None).fraction == pytest.approx(1 / (1 + max(on_0, on_1)))


def test_its_own_instances_count(repository: Path) -> None:
    add(repository, "own", group("kind: KIND_GPU count: 3"))
    part = gpu_part(repository / "own", 0, None)
    assert (part.fraction, part.reason) == (pytest.approx(1 / 3), "instances on this GPU: own 3")
    add(repository, "own", group("kind: KIND_CPU"))  # Triton was told otherwise: an instance is loading
    assert gpu_part(repository / "own", 0, None).fraction == 1


def test_what_is_no_model_does_not_count(repository: Path) -> None:
    add(repository, "ensemble", None)
    (repository / "ensemble" / "config.pbtxt").write_text('platform: "ensemble"')
    (repository / "checkpoint").mkdir()
    (repository / "checkpoint" / "config.json").write_text("{}")
    (repository / "README.md").write_text("")
    (repository / "broken").symlink_to(repository / "nowhere")
    assert gpu_part(repository / "own", 0, None).fraction == 1


def test_a_fraction_that_is_set_holds_and_the_others_share_the_rest(repository: Path) -> None:
    setting = 'parameters: {\n key: "gpu_memory_fraction",\n value: {string_value: "0.2"}\n}\n'
    add(repository, "set", setting + group("count: 2"))
    add(repository, "other")
    part = gpu_part(repository / "own", 0, None)
    assert part.fraction == pytest.approx(0.3)
    assert part.reason == "instances on this GPU: other 1, own 1, set 2 of gpu_memory_fraction 0.2"
    own = gpu_part(repository / "own", 0, 0.6)
    assert (own.fraction, own.is_set, own.reason) == (0.6, True, "gpu_memory_fraction 0.6")
    add(repository, "set", setting.replace("0.2", "0.9") + group("count: 2"))
    assert gpu_part(repository / "own", 0, None).fraction == 0


def test_a_repository_that_cannot_be_read_has_one_folder(tmp_path: Path) -> None:
    assert gpu_part(tmp_path / "nowhere" / "own", 0, None).fraction == 1


def test_folders_of_this_project_are_read() -> None:
    for file in ROOT.glob("*/config.pbtxt"):
        assert parse_config_text(file.read_text())["backend"] == ["python"]
    assert gpu_part(ROOT / "falcon7b", 0, None).reason.startswith("instances on this GPU: bge 1, falcon7b 1")


@pytest.mark.parametrize(
    "text", ["a", "a:", "a: {", "a: [1", "a: }", "a { b: 1 >", "1: 2", 'a: "', "a: ,", "]", "a: %"]
)
def test_text_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|unexpected"):
        parse_config_text(text)


def test_fields_are_read() -> None:
    text = "# one\na: 'x # y' b { c: -1.5 d: [ E, F ], e < > } a: \"it's \\\" so\" b: { } g: []"
    assert parse_config_text(text) == {
        "a": ["x # y", "it's \\\" so"],
        "b": [{"c": ["-1.5"], "d": ["E", "F"], "e": [{}]}, {}],
        "g": [],
    }
