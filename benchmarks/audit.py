"""What `midstep audit` adds to a script: every example, and long loops of small models.

    python benchmarks/audit.py [ROUNDS [EXAMPLE ...]]

Each example runs as a process of its own, plain and audited in turn; its processor time is taken,
which on a machine that others use too tells more than the clock. The loops run in one process;
their models are as small as a loop can be useful with, so that watching weighs the most.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from timing import interleaved, machine
from torch import nn

from midstep.auditing.recorder.watching import watch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WIDTHS = (32, 256, 1024)
STEPS = 400


def run(*command: str) -> float:
    """Processor seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loop(width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, width), torch.randint(0, 10, (32,))
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def watched(width: int) -> None:
    with watch(find_optimizers=False):
        loop(width)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    names = sys.argv[2:]
    print(machine())
    for example in [path for path in EXAMPLES if not names or path.stem in names]:
        pairs = [
            (run(str(example)), run("-m", "midstep", "audit", str(example)))
            for _ in range(rounds + 1)
        ][1:]
        seconds = statistics.median(plain for plain, _ in pairs)
        ratios = sorted(audited / plain for plain, audited in pairs)
        middle = statistics.median(ratios)
        print(
            f"{example.stem:16} {seconds:6.2f} s, audited {middle:.3f}x "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(pairs)} pairs)",
            flush=True,
        )
    for width in () if names else WIDTHS:
        ways = {
            "plain": lambda width=width: loop(width),
            "audit": lambda width=width: watched(width),
        }
        found = interleaved(ways, rounds=rounds, warmup=1)
        per_step = 1e6 * found["plain"][0] / STEPS
        print(f"width {width:10} {per_step:6.0f} us a microbatch, watched {found['audit'][1]:.3f}x")


if __name__ == "__main__":
    main()
