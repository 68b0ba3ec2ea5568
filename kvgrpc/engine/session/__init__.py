"""Session: the connection of a scheduler to its lead, and to the next lead when that one dies."""
