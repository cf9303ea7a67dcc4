"""A data format: the column `text` of .csv files. `--data.sources my/` finds them."""

import csv
from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> Iterator[str]:
    """The text of each document of a file, in order."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["text"]
