"""What pictures of plans have in common: the page, and words on it. Decides nothing about what is drawn."""

from __future__ import annotations

from collections.abc import Iterable


def page(body: Iterable[str], *, width: float, height: float) -> str:
    """A white page with the elements of `body`."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
    )
    style = ' font-family="system-ui, sans-serif" font-size="12">'
    return f'{head}{style}<rect width="{width:g}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'


def words(
    x: float, y: float, text: str, *, size: int = 12, weight: int = 400, anchor: str = "start", fill: str = "#111"
) -> str:
    """A line of text at a place."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
