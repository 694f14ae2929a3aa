"""SPS profile: steps per second of a target on a machine, over the tokens in its verify pass (paper, section 3.2).

    Θ = (expected tokens of a round) × SPS(n),   SPS(n) = 1 / T(n)

n counts the tokens of the pass, those of all rows together: R anchors and what is verified behind them. T(n) is the
time of a whole round in seconds, drafting included. Points are measured at a few n; T is linear between them.

On disk it is the JSON that SGLang reads (`sample_batch_tokens`, `sample_steps_per_sec`, `max_batch_tokens`), with keys
of our own beside those.
"""

import json
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class SPSProfile:
    """Measured rounds per second; all rates in 1/s, all times in seconds.

    Args:
        tokens: in the verify pass, summed over the rows; increasing, from 1 up.
        steps_per_second: rounds per second with that many tokens, as measured.
        plain_steps_per_second: steps per second of plain decoding, without a drafter; None where not measured.
        batches: curves measured for other numbers of rows, by number of rows. The curve itself is that of one row, or
            with no `batches` that of any number.
        details: how it was measured (machine, versions, raw repeats): JSON data that nothing here reads.

    Raises:
        ValueError: points that are no curve.
    """

    tokens: list[int]
    steps_per_second: list[float]
    plain_steps_per_second: float | None = None
    batches: dict[int, "SPSProfile"] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        counts = self.tokens
        if not counts or any(type(n) is not int or n < 1 for n in counts) or any(a >= b for a, b in pairwise(counts)):
            raise ValueError(f"tokens is {counts}, expected increasing whole numbers from 1 up")
        if len(self.steps_per_second) != len(counts):
            raise ValueError(f"steps_per_second has {len(self.steps_per_second)} values, expected {len(counts)}")
        plain = self.plain_steps_per_second
        for name, rates in (("steps_per_second", self.steps_per_second), ("plain_steps_per_second", [plain])):
            if any(rate is not None and not 0 < rate < math.inf for rate in rates):
                raise ValueError(f"{name} is {getattr(self, name)}, expected positive rates")
        for rows, curve in self.batches.items():
            if type(rows) is not int or rows < 1 or curve.tokens[0] < rows or curve.batches:
                raise ValueError(
                    f"batches holds for {rows!r} rows a curve that starts at {curve.tokens[0]} tokens, expected at "
                    "least one token per row, and no further curves inside"
                )

    def __hash__(self):
        return hash((tuple(self.tokens), tuple(self.steps_per_second)))

    def seconds(self, tokens: torch.Tensor) -> torch.Tensor:
        """T of a round with that many tokens in the pass, any shape → float64 of the same shape. Below the first point
        that of the first; beyond the last point the last slope goes on, unless it falls."""
        x = torch.tensor(self.tokens, dtype=torch.float64, device=tokens.device)
        y = 1 / torch.tensor(self.steps_per_second, dtype=torch.float64, device=tokens.device)
        tokens = tokens.double().clamp(min=float(x[0]))
        slopes = y.diff() / x.diff()
        beyond = slopes[-1:].clamp(min=0.0) if len(slopes) else torch.zeros_like(y)
        slopes = torch.cat([slopes, beyond])
        left = torch.searchsorted(x, tokens, right=True) - 1
        return y[left] + slopes[left] * (tokens - x[left])

    def steps(self, tokens: torch.Tensor) -> torch.Tensor:
        """SPS = 1 / T, any shape → float64 of the same shape."""
        return 1 / self.seconds(tokens)

    def envelope(self) -> "SPSProfile":
        """The curve that can be had: T(n) becomes the least T(m) over the points m ≥ n, as a pass may be padded to a
        size that runs faster. SPS never rises with tokens then."""
        best = []
        for rate in reversed(self.steps_per_second):
            best.append(max(rate, best[-1]) if best else rate)
        batches = {rows: curve.envelope() for rows, curve in self.batches.items()}
        return replace(self, steps_per_second=best[::-1], batches=batches)

    def at(self, rows: int) -> "SPSProfile":
        """The curve for a number of rows: as measured, or between two measured numbers of rows interpolated in seconds
        at equal tokens per row; that of the most rows beyond them; itself where there are no `batches`."""
        if rows < 1:
            raise ValueError(f"rows is {rows}, expected 1 or more")
        if not self.batches:
            return self
        curves = {1: self, **self.batches}
        fewer = max(r for r in curves if r <= rows)
        more = min((r for r in curves if r >= rows), default=fewer)
        if fewer == more:
            return curves[fewer]
        share = (rows - fewer) / (more - fewer)
        tokens = sorted({round(n / r * rows) for r in (fewer, more) for n in curves[r].tokens})
        per_row = torch.tensor(tokens, dtype=torch.float64) / rows
        seconds = torch.lerp(curves[fewer].seconds(per_row * fewer), curves[more].seconds(per_row * more), share)
        plain = [curves[r].plain_steps_per_second for r in (fewer, more)]
        plain = None if None in plain else 1 / ((1 - share) / plain[0] + share / plain[1])
        return SPSProfile(tokens, (1 / seconds).tolist(), plain)

    def plain_steps(self, rows: int) -> float | None:
        """Steps per second of plain decoding at a number of rows, None where not measured. Beyond the most rows
        measured it is taken to slow down as a round without drafted tokens does."""
        curve, most = self.at(rows), max(self.batches, default=1)
        if curve.plain_steps_per_second is None or rows <= most:
            return curve.plain_steps_per_second
        few, many = curve.steps(torch.tensor([most, rows])).tolist()
        return curve.plain_steps_per_second * many / few

    def save(self, path: str | Path) -> None:
        """Writes JSON; makes the folder where there is none."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "SPSProfile":
        """Reads what `save` wrote, or a profile of SGLang's.

        Raises:
            ValueError: a file that is no profile.
        """
        try:
            return cls._from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path} is not an SPS profile: {error}") from error

    @classmethod
    def measure(cls, target: Any, drafter: Any = None, **kwargs: Any) -> "SPSProfile":
        """Measures a target on this machine: `measure_profile` with the same arguments."""
        from .profiling_dspark import measure_profile

        return measure_profile(target, drafter, **kwargs)

    def to_json(self) -> dict[str, Any]:
        """What `save` writes."""
        return {
            "sample_batch_tokens": self.tokens,
            "sample_steps_per_sec": self.steps_per_second,
            "max_batch_tokens": self.tokens[-1],
            "monotone_steps_per_sec": self.envelope().steps_per_second,
            "plain_steps_per_sec": self.plain_steps_per_second,
            "batches": {str(rows): curve.to_json() for rows, curve in self.batches.items()},
            "details": self.details,
        }

    @classmethod
    def _from_json(cls, data: Any) -> "SPSProfile":
        names = ("sample_batch_tokens", "sample_steps_per_sec")
        for name in names:
            if not isinstance(data, dict) or not isinstance(data.get(name), list):
                raise ValueError(f"expected an object with a list {name!r}")
            if not all(isinstance(value, int | float) for value in data[name]):
                raise ValueError(f"{name} is {data[name]}, expected numbers")
        return cls(
            *(data[name] for name in names),
            plain_steps_per_second=data.get("plain_steps_per_sec"),
            batches={int(rows): cls._from_json(curve) for rows, curve in (data.get("batches") or {}).items()},
            details=data.get("details") or {},
        )
