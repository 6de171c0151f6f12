"""Whether rows travel as they should on a mesh, and how fast."""
