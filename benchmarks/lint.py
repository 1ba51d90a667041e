"""How long the linter takes: to start, and for 100,000 lines that all hold training loops.

The lines are the corpus of tests/loops, over and over, so every file is read to its end; ordinary
code is left alone after one search for a word. Processor time, since linting uses one core and
waits for nothing.

    python benchmarks/lint.py
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

from midstep.lint import lint, read

LINES = 100_000
LOOPS = Path(__file__).parents[1] / "tests" / "loops"


def seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_to_run(*arguments: str) -> float:
    best = float("inf")
    for _ in range(10):
        before = seconds_of_children()
        subprocess.run([sys.executable, *arguments], check=False, capture_output=True)
        best = min(best, seconds_of_children() - before)
    return best


def main() -> None:
    paths = sorted(LOOPS.glob("*/*.py"))
    lines, files, findings = 0, 0, 0
    begin = time.process_time()
    while lines < LINES:
        for path in paths:
            source = read(path)
            findings += len(lint(source).findings)
            lines += source.text.count("\n")
            files += 1
    took = time.process_time() - begin
    print(f"{lines} lines in {files} files, {findings} findings: {took:.2f} s")
    one = str(paths[0])
    print(f"python alone: {seconds_to_run('-c', 'pass'):.3f} s")
    print(f"midstep lint --help: {seconds_to_run('-m', 'midstep', 'lint', '--help'):.3f} s")
    print(f"midstep lint on one file: {seconds_to_run('-m', 'midstep', 'lint', one):.3f} s")


if __name__ == "__main__":
    main()
