"""The program `phalanx` as a child of a Python program: where that ends, however it ends, this one gets SIGTERM, on which a run saves."""

import signal
import sys

from phalanx.cli.main import main
from phalanx.runtime.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    sys.exit(main())
