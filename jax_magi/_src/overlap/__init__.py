"""How much communication overlaps with attention, in a profile or a compiled program's text."""
