"""Muon QK-Clip. It does not depend on attention, which only passes it values."""
