"""Seeds: from a number to a world with its traffic and faults, run, and shrunk when it fails."""
