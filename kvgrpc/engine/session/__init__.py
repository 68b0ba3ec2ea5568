"""Session: how a scheduler reaches its lead, and the next one when a lead dies."""
