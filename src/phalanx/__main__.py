"""The program `phalanx`, which `python -m phalanx` is too. Ctrl-C while it is still imported ends it as later on."""

import sys


def run() -> int:
    """The exit status of the command that the words of this process name."""
    try:
        from phalanx.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
