"""One lead with many peers: handshakes, what the peers cost at rest, and what a pull costs among them."""
