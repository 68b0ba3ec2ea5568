"""`python -m kvgrpc`: the command line."""

from kvgrpc.cli import main

if __name__ == "__main__":
    main()
