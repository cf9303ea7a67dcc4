"""The families of Hugging Face checkpoints that a run can come from and go to: names of tensors and options of `config.json`, both ways.

Each family decides its rules in a file of its own and knows nothing of the others; `families()` lists ours and those of installed packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.models.families.family import Family as Family
    from phalanx.models.families.known import (
        families as families,
        families_for as families_for,
        find_family as find_family,
    )
    from phalanx.models.families.names import NameLink as NameLink, in_tensor as in_tensor, shapes_of as shapes_of
else:
    __getattr__ = lazy(__name__)
