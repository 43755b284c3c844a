# SPDX-License-Identifier: Apache-2.0
"""What `hf-triton optimize` knows of each candidate, and which one it chooses. Starts no process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.errors import ServerError
from hf_triton.folders.candidates import TEXTS, Candidate, Case, Child

MIN_GAIN: Final = 1.1
MIN_COSINE: Final = 0.97
MIN_AGREEMENT: Final = 0.98
"""What int8 must keep of each text's outputs, and of the texts' labels, neighbours or order."""
ROUND_S: Final = 0.5
MIN_RUNS: Final = 3
MAX_RUNS: Final = 20
"""How long one case takes in a round."""
MAX_SCATTER: Final = 3.0
"""How many times as long as the shortest run nine of ten may take; what scatters more is noise."""
Outputs = Sequence[npt.NDArray[np.float32]]


@dataclass
class Row:
    name: str
    candidate: Candidate
    child: Child | None = None
    refusal: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rounds: dict[Case, list[list[float]]] = field(default_factory=dict)
    """The seconds of each run of each round, by case."""

    def call(self, method: str, *args: Any) -> Any:
        """Ask its process; None if it fails, which refuses the candidate."""
        if self.child is None or self.refusal:
            return None
        try:
            return self.child.call(method, *args)
        except ServerError as error:
            self.refusal = error.sentence
            return None

    def time(self, case: Case) -> None:
        """Run a case for one round; before the first, once for the number of runs."""
        first = self.rounds.setdefault(case, [])
        if not first:
            warm = self.call("times_s", case, MIN_RUNS)
            num_runs = min(MAX_RUNS, int(ROUND_S / min(warm))) if warm else 1
            self.facts.setdefault("num_runs", {})[case] = max(MIN_RUNS, num_runs)
        times_s = self.call("times_s", case, self.facts["num_runs"][case])
        if times_s:
            first.append(times_s)

    def is_complete(self, base: Row) -> bool:
        """Whether it ran all that another did."""
        return all(len(self.rounds.get(case, ())) == len(rounds) for case, rounds in base.rounds.items())

    def gain(self, base: Row, case: Case) -> float:
        """How many times as fast as another it is: the median of the rounds' ratios."""
        pairs = zip(base.rounds[case], self.rounds[case], strict=True)
        return statistics.median(statistics.median(other) / statistics.median(own) for other, own in pairs)

    def total_gain(self, base: Row) -> float:
        """The geometric mean over the cases that were asked for."""
        return statistics.geometric_mean(self.gain(base, case) for case in self.rounds if case != TEXTS)

    def samples_s(self, case: Case) -> list[float]:
        return [time_s for each in self.rounds[case] for time_s in each]

    def scatter(self, case: Case) -> float:
        """How many times as long as the shortest run nine of ten take."""
        samples_s = self.samples_s(case)
        return float(np.percentile(samples_s, 90)) / min(samples_s)

    def least_gain(self, base: Row) -> float:
        """The lower of `total_gain` and the gain by the shortest runs, which other programs disturb least."""
        cases = [case for case in self.rounds if case != TEXTS]
        by_shortest = (min(base.samples_s(case)) / min(self.samples_s(case)) for case in cases)
        return min(self.total_gain(base), statistics.geometric_mean(by_shortest))


def noisiest(rows: Sequence[Row]) -> tuple[Row, tuple[int, int]] | None:
    """The candidate and case whose times scatter most, if they scatter too much to decide by."""
    pairs = [(row, case) for row in rows for case in row.rounds if not isinstance(case, str)]
    row, case = max(pairs, key=lambda pair: pair[0].scatter(pair[1]))
    return (row, case) if row.scatter(case) > MAX_SCATTER else None


def measure(rows: Sequence[Row], cases: Sequence[Case], num_rounds: int) -> None:
    """Time all cases in rounds in which the candidates take turns."""
    for _ in range(num_rounds):
        for case in cases:
            for row in rows:
                if not row.refusal:
                    row.time(case)


def judge(row: Row, reference: Outputs, outputs: Outputs, tolerance: float, kind: str) -> None:
    """Compare outputs, and refuse a candidate whose outputs differ by more than `tolerance`; 8 bits have a rule."""
    pairs = list(zip(reference, outputs, strict=True))
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    cosine = min(_cosine(one.ravel(), other.ravel()) for one, other in pairs)
    same = agreement(reference, outputs, kind)
    row.facts |= {"difference": difference, "cosine": cosine, "agreement": same}
    if row.name.endswith("int8"):
        if cosine < MIN_COSINE or same < MIN_AGREEMENT:
            row.refusal = f"cosine {cosine:.3f} and agreement {same:.3f}: int8 needs {MIN_COSINE} and {MIN_AGREEMENT}"
    elif difference > tolerance:
        row.refusal = f"an output differs by {difference:.1e}, more than {tolerance:g}"


def agreement(reference: Outputs, outputs: Outputs, kind: str) -> float:
    """The part of the texts that keep what counts, from 0 to 1.

    Of `vectors` the nearest neighbours count, of `logits` the largest; single ones are scores, whose order counts, by
    pairs of texts.
    """
    if kind == "vectors":
        return float(np.mean(_nearest(reference) == _nearest(outputs)))
    if reference[0].size == 1:
        scores = [(float(one.item()), float(other.item())) for one, other in zip(reference, outputs, strict=True)]
        return statistics.fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(scores, 2))
    pairs = zip(reference, outputs, strict=True)
    return float(np.mean(np.concatenate([np.ravel(one.argmax(-1) == other.argmax(-1)) for one, other in pairs])))


def _nearest(vectors: Outputs) -> npt.NDArray[np.int64]:
    """The text nearest to each, by the cosine of their vectors, or of the mean vectors of their tokens."""
    means = np.stack([each.reshape(-1, each.shape[-1]).mean(0) for each in vectors])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    likeness = means @ means.T
    np.fill_diagonal(likeness, -np.inf)
    nearest: npt.NDArray[np.int64] = likeness.argmax(1)
    return nearest


def _cosine(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(one @ other / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12))


def timing_rows(rows: Sequence[Row], base: Row) -> list[dict[str, Any]]:
    """Milliseconds by case and candidate."""
    return [
        {
            "candidate": row.name,
            "batch": case[0],
            "tokens": case[1],
            **{
                name: round(value, 2)
                for name, value in _statistics([1000 * time_s for time_s in row.samples_s(case)]).items()
            },
            "times pytorch": round(row.gain(base, case), 2),
        }
        for case in base.rounds
        if case != TEXTS
        for row in rows
        if row.is_complete(base)
    ]


def _statistics(values: list[float]) -> Mapping[str, float]:
    return {
        "mean ms": statistics.fmean(values),
        "sd": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
        "median": statistics.median(values),
        "p95": float(np.percentile(values, 95)),
        "p99": float(np.percentile(values, 99)),
    }


def summary_rows(rows: Sequence[Row], base: Row, num_texts: int) -> list[dict[str, Any]]:
    return [
        {
            "candidate": row.name,
            "texts/s, mixed": _per_second(row, num_texts),
            "load s": _rounded(row.facts.get("load_s"), 2),
            "MB": _rounded(row.facts.get("num_bytes", 0) / 1e6, 1) or None,
            "largest difference": _rounded(row.facts.get("difference"), 9),
            "lowest cosine": _rounded(row.facts.get("cosine"), 6),
            "agreement": _rounded(row.facts.get("agreement"), 3),
            "times pytorch": round(row.total_gain(base), 2) if row.is_complete(base) else None,
            "verdict": f"refused: {row.refusal}" if row.refusal else "kept",
        }
        for row in rows
    ]


def _per_second(row: Row, num_texts: int) -> float | None:
    rounds = row.rounds.get(TEXTS)
    return round(num_texts / statistics.median(time_s for each in rounds for time_s in each), 1) if rounds else None


def _rounded(figure: float | None, digits: int) -> float | None:
    return None if figure is None else round(figure, digits)
