"""Line charts as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping

from regard.pictures.colours import hexadecimal, roles
from regard.pictures.vector import SANS

WIDTH, PANEL = 760.0, 132.0  # the picture's width, and the height of a panel with its name
LEFT, RIGHT, TOP = 76.0, 96.0, 44.0
Line = dict[float, float]  # step to value


def draw(title: str, charts: Mapping[str, Mapping[str, Line]]) -> str:
    """Draw one panel below the other with a common axis of steps."""
    steps = [step for lines in charts.values() for line in lines.values() for step in line]
    first, last = min(steps, default=0), max(steps, default=1)
    height = TOP + PANEL * max(len(charts), 1) + 30

    def across(step: float) -> float:
        return LEFT + (step - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)

    parts = [f'<text class="ink bold" x="{LEFT}" y="26" font-size="15">{html.escape(title)}</text>']
    for number, (name, lines) in enumerate(charts.items()):
        parts += _panel(name, lines, TOP + PANEL * number, across)
    bottom = TOP + PANEL * len(charts)
    for tick in ticks(first, last, 6):
        parts.append(_text(across(tick), bottom + 8, f"{tick:,.0f}", "muted", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 24, "step", "muted", "middle"))
    size = f'width="{WIDTH:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
        f'role="img"><title>{html.escape(title)}</title><style>{_style()}</style>'
        f'<rect class="paper" {size}/>{"".join(parts)}</svg>\n'
    )


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round numbers from ``low`` to ``high``.

    >>> ticks(0, 1000, 6), ticks(2.9, 5.7, 4)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [3.0, 4.0, 5.0])
    """
    rough = max((high - low) / most, 1e-300)
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10):
        step = factor * power
        start, stop = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if stop - start < most:
            return [index * step for index in range(start, stop + 1)]
    return []


def _panel(
    name: str, lines: Mapping[str, Line], top: float, across: Callable[[float], float]
) -> list[str]:
    values = [value for line in lines.values() for value in line.values()]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12
    above, below = top + 22, top + PANEL - 12

    def up(value: float) -> float:
        return below - (value - low) / (high - low) * (below - above)

    parts = [_text(LEFT, top + 12, name, "ink bold", "start")]
    for tick in ticks(low, high, 4):
        y = up(tick)
        parts.append(f'<path class="line" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:.4g}", "muted", "end"))
    ends: list[float] = []
    for label, line in lines.items():
        kind = "other" if label == "held out" else "one"
        points = [(across(step), up(value)) for step, value in sorted(line.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="{kind}" d="M{path}"/>')
        if label == "held out" or len(points) == 1:  # mark each point
            for (x, y), (step, value) in zip(points, sorted(line.items()), strict=True):
                tip = f"<title>step {step:,.0f}: {value:.5g}</title>"
                parts.append(
                    f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3">{tip}</circle>'
                )
        if label:
            x, y = points[-1]
            while any(abs(y - end) < 14 for end in ends):  # labels must not overlap
                y -= 14
            ends.append(y)
            parts.append(_text(x + 8, y + 4, label, f"{kind} name", "start"))
    return parts


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {at} font-size="12">{html.escape(text)}</text>'


def _style() -> str:
    rules = (
        f"text{{font-family:{SANS}}}.bold{{font-weight:600}}path{{fill:none}}"
        "path.one,path.other{stroke-width:2;stroke-linejoin:round}"
    )
    for dark in (False, True):
        paint = {name: hexadecimal(colour) for name, colour in roles(dark).items()}
        paint |= {"one": paint["bar"], "other": "#e8a13a" if dark else "#b45f06"}
        part = "".join(f".{name}{{fill:{paint[name]}}}" for name in ("paper", "ink", "muted"))
        part += f"path.line{{stroke:{paint['line']}}}"
        for name in ("one", "other"):
            part += f"path.{name}{{stroke:{paint[name]};fill:none}}"
            part += f"circle.{name},text.{name}{{fill:{paint[name]}}}"
        rules += f"@media (prefers-color-scheme:dark){{{part}}}" if dark else part
    return rules
