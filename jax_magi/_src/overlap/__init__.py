"""How much communication ran beside attention: in a profile, and in a compiled program's text."""
