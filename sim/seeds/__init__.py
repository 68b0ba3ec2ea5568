"""Makes a world with its traffic and faults from a number, runs it, and shrinks it if it fails."""
