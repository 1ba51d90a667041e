"""What does a window send, how often, and how long does it take on 8 to 4,096 ranks?

    python benchmarks/ranks.py [--markdown]

Computed, not measured: the number of collectives and their bytes are counted (of midstep by its
tests; of Accelerate 1.15.0 and Transformers 5.24.0 by running a window of theirs on two ranks), and
turned into seconds by the alpha-beta model with the constants below. One flat network, the best
known algorithm for each size, nothing hidden behind computation.

    all-reduce       min(2 log2(n) alpha + 2 m beta,  2 (n - 1) alpha + 2 (n - 1)/n m beta)
    all-gather       min(log2(n), n - 1) alpha + (n - 1)/n m beta,   m bytes when gathered
    reduce-scatter   as all-gather

Reference: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations
in MPICH", for the algorithms.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator

ALPHA = 5e-6  # seconds a step between two machines takes before the first byte
BETA = 1 / 50e9  # seconds a byte: 400 Gbit/s for each rank
LAUNCH = 20e-6  # seconds to start a collective
READ = 20e-6  # seconds until the host knows a number of the device

RANKS = (8, 64, 512, 4096)
PARAMETERS = 1_000_000_000
GRADIENT = 4 * PARAMETERS  # bytes, float32
GROUPS = 33  # of FSDP2: 32 blocks and the root
BUCKET = 25 * 2**20  # bytes, of DDP
MICROBATCHES = 8
LOG_EVERY = 500  # windows; the default of Transformers


@dataclasses.dataclass(frozen=True)
class Send:
    """A collective of a window.

    Attributes:
        kind: `reduce`, `gather` or `scatter`.
        m: Bytes: of the buffer that is reduced, or of all parts together.
        count: How often a window.
        per_rank: Whether `m` is what each rank gives, so that all parts are n times as much.
    """

    kind: str
    m: float
    count: float = 1.0
    per_rank: bool = False

    def bytes(self, n: int) -> float:
        """What one rank sends in a window."""
        whole = self.m * n if self.per_rank else self.m
        return self.count * whole * (n - 1) / n * (2 if self.kind == "reduce" else 1)

    def seconds(self, n: int) -> float:
        """How long all of them take, one after the other."""
        whole, tree = self.m * n if self.per_rank else self.m, math.log2(n)
        if self.kind == "reduce":
            slow = 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * whole * BETA
            taken = min(2 * tree * ALPHA + 2 * whole * BETA, slow)
        else:
            taken = min(tree, n - 1) * ALPHA + (n - 1) / n * whole * BETA
        return self.count * (LAUNCH + taken)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What one library does in a window, beside forward, backward and the optimizer.

    Attributes:
        gradients: Collectives that move gradients and parameters.
        small: Collectives of a few numbers.
        reads: How often the host waits for a number.
    """

    gradients: tuple[Send, ...]
    small: tuple[Send, ...]
    reads: float


DDP = (Send("reduce", BUCKET, math.ceil(GRADIENT / BUCKET)),)


def sharded(*, gathers: float, scatters: float) -> tuple[Send, ...]:
    part = GRADIENT / GROUPS
    return Send("gather", part, gathers), Send("scatter", part, scatters)


# In forward and again in backward; the root's stay from one to the other.
EACH = MICROBATCHES * (2 * GROUPS - 1)
ONCE_A_WINDOW = sharded(gathers=EACH, scatters=GROUPS)
# Who has data, counts, terms: 42 numbers, and 65 more in lockstep; then norm, loss sum, a flag.
OPENING, LOCKSTEP, END = Send("reduce", 336), Send("reduce", 856), Send("reduce", 32)
ITEMS = Send("gather", 8, per_rank=True)  # `gather(num_items)`, an int64 of each rank
LOSS = Send("gather", 4, per_rank=True)  # `gather(loss)`, a float32 of each rank
NORM = Send("reduce", 4)  # a float32, where gradients lie in shards; whole ones need none

PATTERNS: dict[str, dict[str, Pattern]] = {
    "DDP": {
        "midstep": Pattern(DDP, (OPENING, END), reads=2),
        "Accelerate, targets gathered": Pattern(DDP, (ITEMS, LOSS), reads=1),
        "Accelerate, sync_each_batch": Pattern(DDP * MICROBATCHES, (ITEMS, LOSS), reads=1),
        "Transformers": Pattern(
            DDP, (ITEMS, dataclasses.replace(LOSS, count=2 / LOG_EVERY)), reads=2 * MICROBATCHES
        ),
    },
    "FSDP2": {
        "midstep": Pattern(ONCE_A_WINDOW, (LOCKSTEP, END), reads=2),
        "midstep, keep_gathered": Pattern(
            sharded(gathers=GROUPS, scatters=GROUPS), (LOCKSTEP, END), reads=2
        ),
        "Accelerate, targets gathered": Pattern(ONCE_A_WINDOW, (ITEMS, NORM, LOSS), reads=1),
        "Accelerate, sync_each_batch": Pattern(
            sharded(gathers=EACH, scatters=MICROBATCHES * GROUPS), (ITEMS, NORM, LOSS), reads=1
        ),
        "Transformers": Pattern(
            ONCE_A_WINDOW,
            (ITEMS, NORM, dataclasses.replace(LOSS, count=2 / LOG_EVERY)),
            reads=2 * MICROBATCHES,
        ),
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A pattern on so many ranks."""

    kind: str
    name: str
    n: int
    large: float
    large_bytes: float
    large_seconds: float
    small: float
    small_bytes: float
    small_seconds: float
    read_seconds: float


def rows() -> Iterator[Row]:
    for kind, patterns in PATTERNS.items():
        for name, pattern in patterns.items():
            for n in RANKS:
                yield Row(
                    kind,
                    name,
                    n,
                    sum(send.count for send in pattern.gradients),
                    sum(send.bytes(n) for send in pattern.gradients),
                    sum(send.seconds(n) for send in pattern.gradients),
                    sum(send.count for send in pattern.small),
                    sum(send.bytes(n) for send in pattern.small),
                    sum(send.seconds(n) for send in pattern.small),
                    pattern.reads * READ,
                )


def cells(row: Row) -> list[str]:
    return [
        row.kind,
        row.name,
        f"{row.n:,}",
        f"{row.large:,.0f}",
        f"{row.large_bytes / 1e9:.1f}",
        f"{row.large_seconds * 1e3:,.0f}",
        f"{row.small:.3g}",
        f"{row.small_bytes:,.0f}",
        f"{row.small_seconds * 1e6:,.0f}",
        f"{row.read_seconds * 1e6:,.0f}",
    ]


TITLES = [
    "model", "pattern", "ranks", "large", "GB", "ms", "small", "bytes", "us", "us of reads",
]  # fmt: skip


def main() -> None:
    print(
        f"alpha {ALPHA * 1e6:g} us, {1 / BETA / 1e9:g} GB/s, {LAUNCH * 1e6:g} us a launch, "
        f"{READ * 1e6:g} us a read; {PARAMETERS / 1e9:g}e9 parameters in float32, {GROUPS} groups "
        f"or buckets of 25 MiB, {MICROBATCHES} microbatches. Computed, not measured.\n"
    )
    table = [TITLES, *(cells(row) for row in rows())]
    if "--markdown" in sys.argv:
        table.insert(1, ["---"] * len(TITLES))
        print("\n".join(f"| {' | '.join(line)} |" for line in table))
        return
    widths = [max(len(line[index]) for line in table) for index in range(len(TITLES))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
