# SPDX-License-Identifier: Apache-2.0
"""The part of a GPU that an instance may take, read from the folders of its model repository."""

from pathlib import Path

import pytest

from hf_triton.hub.config_text import parse_config_text
from hf_triton.hub.neighbours import gpu_part
from tests.support.paths import ROOT

PYTHON = 'backend: "python"\n'
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
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


@pytest.mark.parametrize("policy", ["all { }", "specific: { versions: [ 1, 3, 9 ] }", "latest { num_versions: 2 }"])
def test_each_loaded_version_has_instances(policy: str, repository: Path) -> None:
    for version in ("2", "3"):
        (repository / "own" / version).mkdir()
    assert gpu_part(repository / "own", 0, None).fraction == 1  # by default the latest is loaded
    add(repository, "own", f"version_policy: {{ {policy} }}")
    count = 3 if "all" in policy else 2
    assert gpu_part(repository / "own", 0, None).reason == f"instances on this GPU: own {count}"


def test_gpus_without_its_instances_do_not_decide(repository: Path) -> None:
    add(repository, "own", group("gpus: [ 1 ]"))
    add(repository, "other", group("count: 5 gpus: [ 0 ]"))
    assert gpu_part(repository / "own", None, None).fraction == 1
    assert gpu_part(repository / "other", None, None).fraction == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("name", "config", "count"),
    [
        ("own_stream", DECOUPLED, 0),
        ("door", f'{DECOUPLED} parameters {{ key: "stream_of" value {{ string_value: "own" }} }}', 0),
        ("own_stream", "", 1),
        ("door", DECOUPLED, 1),
        ("own_stream", f'{DECOUPLED} parameters {{ key: "task" value {{ string_value: "x" }} }}', 1),
    ],
)
def test_a_stream_door_has_no_weights(name: str, config: str, count: int, repository: Path) -> None:
    add(repository, name, config)
    assert gpu_part(repository / "own", 0, None).fraction == 1 / (1 + count)


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
    (repository / "loop").symlink_to(repository / "loop")
    (repository / "long").symlink_to("x" * 300)  # whose status is an error
    add(repository, "other")
    assert gpu_part(repository / "own", 0, None).fraction == 1 / 2


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


@pytest.mark.parametrize("fraction", ["-5", "0", "1.5", "nan", "inf", "half", ""])
def test_a_fraction_that_cannot_be_set_is_none(fraction: str, repository: Path) -> None:
    add(repository, "other", f'parameters {{ key: "gpu_memory_fraction" value {{ string_value: "{fraction}" }} }}')
    assert gpu_part(repository / "own", 0, None).fraction == 1 / 2


def test_a_fraction_of_its_file_that_triton_was_not_given_is_none(repository: Path) -> None:
    for name in ("own", "other"):
        add(repository, name, 'parameters { key: "gpu_memory_fraction" value { string_value: "0.25" } }')
    assert gpu_part(repository / "own", 0, None).fraction == 0.75


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


@pytest.mark.parametrize("gap", ["#" * 5000, " #" * 5000, "#\n" * 5000, " " * 50000])
def test_a_character_that_is_none_is_found_at_once_behind_comments(gap: str) -> None:
    with pytest.raises(ValueError, match="unexpected"):
        parse_config_text(f"a: 1\n{gap}\n${{b}}")
    assert parse_config_text(f"a: 1 {gap}") == {"a": ["1"]}


def test_fields_are_read() -> None:
    text = "# one\na: 'x # y' b { c: -1.5 d: [ E, F ], e < > } a: \"it's \\\" so\" b: { } g: []"
    assert parse_config_text(text) == {
        "a": ["x # y", "it's \\\" so"],
        "b": [{"c": ["-1.5"], "d": ["E", "F"], "e": [{}]}, {}],
        "g": [],
    }
