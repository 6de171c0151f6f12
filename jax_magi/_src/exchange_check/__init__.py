"""Tests the exchange of rows between the ranks of a mesh, and measures its speed."""
