"""Masks as data: slices, the class around them, its constructors and pictures."""
