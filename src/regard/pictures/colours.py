"""The colours of pictures: ramps of equal steps in lightness.

Shades are computed in OKLCh (https://bottosson.github.io/posts/oklab/), where equal steps look
equal. Larger numbers are darker on a light page and lighter on a dark page. Signed numbers have two
hues: blue above 0 and orange below 0.
"""

from __future__ import annotations

import math
from functools import cache

Colour = tuple[int, int, int]  # red, green, blue, each 0 to 255

LEVELS = 256
_ROLES: dict[str, tuple[Colour, Colour]] = {  # on a light page and on a dark one
    "paper": ((255, 255, 255), (22, 23, 29)),
    "ink": ((26, 28, 38), (233, 234, 240)),
    "muted": ((94, 99, 115), (160, 163, 176)),
    "line": ((214, 217, 226), (62, 65, 78)),
    "bar": ((38, 110, 168), (92, 178, 214)),
}
_PAPER_FROM = {False: 0.5, True: 0.68}  # by ``signed``: the strength above which text is paper


def roles(dark: bool) -> dict[str, Colour]:
    """The colours of page, text, lines and bars."""
    return {name: colours[dark] for name, colours in _ROLES.items()}


@cache
def ramp(*, dark: bool, signed: bool) -> tuple[Colour, ...]:
    """All shades from the smallest to the largest number; if ``signed``, the middle is 0."""
    if signed:
        return tuple(_two_sided(2 * i / (LEVELS - 1) - 1, dark) for i in range(LEVELS))
    steps = (i / (LEVELS - 1) for i in range(LEVELS))
    # On a dark page 0 is dark; on a light page 0 is light and the largest number not quite black.
    return tuple(_one_sided(step if dark else 1 - 0.87 * step) for step in steps)


def level(value: float, low: float, high: float) -> int:
    """The index of the shade of a value on a scale from ``low`` to ``high``."""
    if high <= low:
        return LEVELS // 2 if value else 0  # all numbers are equal
    return round(min(max((value - low) / (high - low), 0), 1) * (LEVELS - 1))


def written_on(shade: int, signed: bool) -> str:
    """The role of text on a shade: ink on weak shades, paper on strong shades."""
    step = shade / (LEVELS - 1)
    strength = abs(2 * step - 1) if signed else step
    return "paper" if strength > _PAPER_FROM[signed] else "ink"


def hexadecimal(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# The same ramps as codes of a 256-colour terminal. The lightness changes in equal steps.
_UP = (233, 17, 18, 19, 25, 31, 38, 79, 151, 194, 230)
_BLUE = (24, 25, 32, 39, 75)
_ORANGE = (94, 130, 166, 172, 215)
_PALE_BLUE = (153, 75, 32, 25, 24)
_PALE_ORANGE = (223, 215, 172, 166, 130)


def ramp_of_256(*, dark: bool, signed: bool) -> tuple[int, ...]:
    """All shades as codes of a 256-colour terminal."""
    if not signed:
        steps = _UP if dark else (231, *_UP[:0:-1])
    elif dark:
        steps = (*_ORANGE[::-1], _UP[0], *_BLUE)
    else:
        steps = (*_PALE_ORANGE[::-1], 255, *_PALE_BLUE)
    return tuple(steps[i * len(steps) // LEVELS] for i in range(LEVELS))


def nearest_of_256(colour: Colour) -> int:
    """The code of the nearest colour in the cube of a 256-colour terminal."""
    steps = (0, 95, 135, 175, 215, 255)
    red, green, blue = (
        min(range(6), key=lambda i, c=channel: abs(steps[i] - c))  # type: ignore[misc]
        for channel in colour
    )
    return 16 + 36 * red + 6 * green + blue


def _one_sided(step: float) -> Colour:
    """A ramp from dark indigo through blue and teal to pale yellow."""
    lightness = 0.2 + 0.785 * step
    hue = 282 - 62 * step - 102 * step**2.5
    chroma = 0.012 + 0.105 * math.sin(math.pi * step) ** 1.1
    return _oklch(lightness, chroma, hue)


def _two_sided(step: float, dark: bool) -> Colour:
    strength = abs(step)
    lightness = 0.23 + 0.55 * strength if dark else 0.975 - 0.5 * strength
    # 0 is grey, so that it looks neither positive nor negative.
    return _oklch(lightness, 0.155 * strength, 248 if step > 0 else 48)


def _oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """Convert OKLCh to sRGB; reduce the chroma until the colour is in sRGB."""
    while True:
        linear = _linear(lightness, chroma, math.radians(hue))
        if chroma <= 0.002 or all(-0.0005 <= channel <= 1.0005 for channel in linear):
            break
        chroma -= 0.002
    red, green, blue = (_encoded(min(max(channel, 0), 1)) for channel in linear)
    return red, green, blue


def _linear(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _encoded(channel: float) -> int:
    """Apply the gamma of sRGB to a linear channel; return 0 to 255."""
    curved = 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
    return round(255 * curved)
