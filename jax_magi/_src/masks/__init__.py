"""Masks as data: slices, the mask class, its constructors, and pictures."""
