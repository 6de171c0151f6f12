"""Muon QK-Clip. It stands beside attention: what goes from one to the other is a value."""
