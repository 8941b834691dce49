"""How well and how fast: one definition of each score."""
