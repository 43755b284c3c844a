# SPDX-License-Identifier: Apache-2.0
"""What the probe at load takes for right and for wrong: `python -m benchmarks.probe --out probe.json`.

60 deep narrow models of random weights in bfloat16, each with four right arithmetics (its own, sums in another order,
fused norms and gates, both), 8 of them with planted faults. Beside the probe's rule: 5 % of the largest logit in
bfloat16, which it had before. Refused right ways and accepted faults are what counts; no figure depends on speed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch

from hf_triton.runner.model_comparison import HALF_LIMIT, distance
from hf_triton.runner.model_runner import PACKED
from hf_triton.runner.way_probe import WayProbe, short_windows
from tests.support.deep_models import (
    STEP_FAULTS,
    attention_fault,
    build_deep,
    faults_of,
    fused,
    in_steps,
    other_sums,
    step_fault,
)

MODELS: Final = [
    *(
        ("llama", num_layers, seed)
        for num_layers, count in ((32, 10), (48, 2), (64, 2), (80, 10))
        for seed in range(count)
    ),
    *(("qwen3", 36, seed) for seed in range(10)),
    *((kind, num_layers, seed) for kind, num_layers in (("mistral", 32), ("gemma2", 26)) for seed in range(13)),
]
WITH_FAULTS: Final = 2
"""How many models of each kind have faults."""


def measure(kind: str, num_layers: int, seed: int, *, has_faults: bool) -> list[dict[str, Any]]:
    """The verdicts on one model."""
    model, rows = build_deep(kind, num_layers, 1000 * num_layers + seed), []
    with short_windows(model):
        probe = WayProbe(model)

        right = probe.compute(PACKED)

        def judge(name: str, *, is_right: bool) -> None:
            found = probe.compute(PACKED)
            if not is_right and torch.equal(found, right):
                return  # no layer there has what is at fault
            apart, verdict = distance(probe.comparison.expected, found), probe.judge(PACKED)
            passes = {"passes": verdict.is_right, "passes at 5 %": apart <= HALF_LIMIT}
            names = {"model": f"{kind} {num_layers} {seed}", "what": name, "right": is_right}
            rows.append(names | {"apart": apart} | passes | {"text": verdict.text})

        for name, arithmetics in {
            "its own": (),
            "other sums": (other_sums,),
            "fused": (partial(fused, model),),
            "both": (other_sums, partial(fused, model)),
        }.items():
            with in_steps(*arithmetics):
                judge(name, is_right=True)
        if has_faults:
            every, first, last = range(num_layers), range(1), range(num_layers - 1, num_layers)
            for name in faults_of(kind):
                for place, layers in {"all": every, "first": first, "last": last}.items():
                    with attention_fault(name, layers):
                        judge(f"{name}, {place}", is_right=False)
            for name in STEP_FAULTS:
                with step_fault(name):
                    judge(name, is_right=False)
    return rows


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--few", is_flag=True, help="One model alone.")
def main(out: Path, few: bool) -> None:
    """Measure, write all verdicts, and print the counts."""
    torch.set_num_threads(1)
    rows = [
        row
        for kind, num_layers, seed in (MODELS[-1:] if few else MODELS)
        for row in measure(kind, num_layers, seed, has_faults=seed < WITH_FAULTS or few)
    ]
    counts = {
        f"{'right' if is_right else 'wrong'} ways that pass, {rule}": f"{sum(row[rule] for row in own)} of {len(own)}"
        for is_right in (True, False)
        for own in [[row for row in rows if row["right"] == is_right]]
        for rule in ("passes", "passes at 5 %")
    }
    out.write_text(json.dumps({"counts": counts, "rows": rows}, indent=1) + "\n")
    click.echo(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
