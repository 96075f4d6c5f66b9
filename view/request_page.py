"""The page of one request of a model server: its steps as bars over time, one row for each choice."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.errors import format_count

WIDTH, CHOICE_HEIGHT, BAR_HEIGHT = 1000, 56, 24
"""Sizes of the drawing in SVG units."""
MIN_BAR_WIDTH = 0.5
COLOURS: Mapping[str, str] = {"wait": "#c9c9c9", "prompt": "#d08a2e", "decode": "#2e7dd0"}
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:70em}svg{width:100%;height:auto}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
)
STEP_COLUMNS = ("step", "kind", "start_after", "seconds", "tokens", "rows", "requests")


def build_request_page(title: str, choices: Sequence[Mapping[str, Any]]) -> str:
    """Build the HTML page of a request.

    Args:
        title: The id of the request.
        choices: A JSON object of ``/requests/ID/trace`` for each choice, with `steps`.
    """
    name = html.escape(title)
    duration = max((_find_choice_seconds_until_end(choice) for choice in choices), default=0.0) or 1.0
    drawings = "".join(_draw_choice_as_svg(i, choice, WIDTH / duration) for i, choice in enumerate(choices))
    legend = ", ".join(f'<b style="color:{colour}">{kind}</b>' for kind, colour in COLOURS.items())
    tables = "".join(map(_format_choice_counts_and_steps, choices))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name} · hocket</title><style>{STYLE}</style></head><body><h1>{name}</h1>"
        f"<p>{legend}; the drawing is {duration:.3f} s wide.</p>"
        f'<svg viewBox="0 0 {WIDTH} {CHOICE_HEIGHT * len(choices)}" role="img">{drawings}</svg>{tables}</body></html>'
    )


def _find_choice_seconds_until_end(choice: Mapping[str, Any]) -> float:
    """Find the last moment of a choice, in seconds after its submission."""
    ends = [step["start_after"] + step["seconds"] for step in choice["steps"]]
    return float(max([choice["ended_after"] or 0.0, *ends]))


def _draw_choice_as_svg(number: int, choice: Mapping[str, Any], scale: float) -> str:
    """Draw the steps of a choice as SVG; `scale` is in units per second."""
    top = number * CHOICE_HEIGHT
    first = choice["started_after"] if choice["started_after"] is not None else _find_choice_seconds_until_end(choice)
    bars = [_draw_bar("wait", 0.0, first * scale, top, f"waited {first:.6f} s")]
    for step in choice["steps"]:
        text = (
            f"step {step['step']}, {step['kind']}: {step['tokens']} of {format_count(step['rows'], 'token')}, "
            f"{format_count(step['requests'], 'request')}, {step['seconds'] * 1e3:.2f} ms"
        )
        bars.append(_draw_bar(step["kind"], step["start_after"] * scale, step["seconds"] * scale, top, text))
    label = f'<text x="0" y="{top + CHOICE_HEIGHT - 12}" font-size="14">{html.escape(str(choice["id"]))}</text>'
    return "".join(bars) + label


def _draw_bar(kind: str, left: float, width: float, top: int, text: str) -> str:
    return (
        f'<rect x="{left:.3f}" y="{top}" width="{max(width, MIN_BAR_WIDTH):.3f}" height="{BAR_HEIGHT}" '
        f'fill="{COLOURS.get(kind, "#888")}"><title>{html.escape(text)}</title></rect>'
    )


def _format_choice_counts_and_steps(choice: Mapping[str, Any]) -> str:
    """Format the counts of a choice and the table of its steps as HTML."""
    counts = "; ".join(f"{key}: {value}" for key, value in choice.items() if key != "steps")
    head = "".join(f"<th>{name}</th>" for name in STEP_COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(step[name]))}</td>" for name in STEP_COLUMNS) + "</tr>"
        for step in choice["steps"]
    )
    return f"<p>{html.escape(counts)}</p><table><tr>{head}</tr>{rows}</table>"
