# SPDX-License-Identifier: Apache-2.0
"""`sleep` and `wake`, and what `list` says of a model that sleeps, before a Triton that stands in for one."""

from tests.support.commands import in_process
from tests.support.sleepy_triton import sleepy_triton


def test_a_model_is_put_to_sleep_and_woken() -> None:
    with sleepy_triton(a={}, spare={}, past={}, old=("past",)) as (triton, address):
        triton.loaded = {"a", "past"}

        def told(*command: str, code: int = 0) -> str:
            done = in_process(*command, f"--triton={address}")
            assert done.exit_code == code, done.output
            return (done.stderr if code else done.stdout).splitlines()[-1]

        assert told("sleep", "a") == "a sleeps after 0.01 s; it gave 1.2 kB back."
        assert told("sleep", "a") == "a slept already."
        states = [line.split("\t")[:3] for line in in_process("list", f"--triton={address}").stdout.splitlines()]
        assert {line[0]: line[2] for line in states[1:]} == {"a": "ASLEEP", "past": "READY", "spare": "NOT LOADED"}
        assert triton.asleep == {"a"}
        assert told("wake", "a") == "a is awake after 0.02 s."
        assert told("wake", "a") == "a was awake already."
        assert "'past' cannot sleep: its process is of an older release" in told("sleep", "past", code=1)
        assert "'spare' is not loaded" in told("wake", "spare", code=1)
        assert "'none' does not exist" in told("sleep", "none", code=3)
