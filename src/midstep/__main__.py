"""`python -m midstep`, and so `torchrun -m midstep`: the same command as `midstep`."""

from midstep.cli import main

if __name__ == "__main__":
    main()
