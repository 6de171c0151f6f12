"""The code. Public modules only re-export it. A package here imports only those below it."""
