"""Plans and predictions as text and SVG.

The room decides what a person sees of a plan in a terminal and in a file; it takes no decision about the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.pictures.folding import folding_svg as folding_svg
    from phalanx.observe.pictures.placement import placement_svg as placement_svg, placement_text as placement_text
    from phalanx.observe.pictures.plots import Series as Series, plot as plot
    from phalanx.observe.pictures.reshard import svg_picture as svg_picture, text_picture as text_picture
    from phalanx.observe.pictures.schedule import (
        COLOURS as COLOURS,
        MAX_SPANS as MAX_SPANS,
        NAMES as NAMES,
        text_rows as text_rows,
        timeline_svg as timeline_svg,
    )
else:
    __getattr__ = lazy(__name__)
