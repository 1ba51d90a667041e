"""To resume inside an epoch: read the used batches again, or keep batches in the checkpoint?

    python benchmarks/replay.py

A shuffled loader of 40,000 rows of 256 token ids; the run is saved in the middle of a pass.
"""

import io
import time

import torch
from timing import machine

from midstep.cursor import Cursor

NUM_ROWS, ROW_LENGTH, BATCH_SIZE = 40_000, 256, 16


def stored_bytes(content: object) -> int:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getbuffer().nbytes


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    rows = torch.randint(0, 50_000, (NUM_ROWS, ROW_LENGTH))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(rows), batch_size=BATCH_SIZE, shuffle=True
    )
    half = len(loader) // 2

    before, cursor = torch.get_rng_state(), Cursor()
    stream = cursor.open(loader)
    for _ in range(half):
        next(stream)
    cursor.mark()
    state = cursor.state_dict()
    rest = [batch[0] for batch in stream]

    again = Cursor()
    torch.set_rng_state(before)
    again.load_state_dict(state)
    started = time.perf_counter()
    stream = again.open(loader)
    seconds = time.perf_counter() - started
    same = all(torch.equal(a, b[0]) for a, b in zip(rest, stream, strict=True))

    print(f"{half:,} of {len(loader):,} batches used; the rest is the same: {same}")
    print(f"replay: {stored_bytes(state):,} bytes kept, {seconds:.2f} s to read the used batches,")
    print(f"        {seconds / half * 1e6:.0f} us a batch")
    print(f"stored: {stored_bytes(rest):,} bytes kept, for what is left of the pass")


if __name__ == "__main__":
    main()
