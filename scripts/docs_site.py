"""Hook of mkdocs: what a page says to readers of the repository and the site cannot have.

Links to files outside of docs/ (code, mostly) become their text, and the words behind a code block's language (`not-in-ci: ...`, for the tests) go.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+(?:src|lab|tests|benchmarks|scripts|recipes|launch|examples|[A-Z]+\.md)[^)]*\)"
)
REASON = re.compile(r"^```(\w+) not-in-ci:[^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return REASON.sub(r"```\1", OUTSIDE.sub(r"\1", markdown))
