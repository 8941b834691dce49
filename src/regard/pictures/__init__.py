"""Pictures of attention, drawn as terminal text, PNG, SVG or a self-contained HTML page."""

from regard.pictures.figures import (
    Picture,
    alignment,
    compare,
    head_grid,
    page,
    panels,
    pooled_map,
    top_keys,
    weight_map,
)

__all__ = [
    "Picture",
    "alignment",
    "compare",
    "head_grid",
    "page",
    "panels",
    "pooled_map",
    "top_keys",
    "weight_map",
]
