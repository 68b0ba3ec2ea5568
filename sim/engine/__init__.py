"""A simulated engine and its worker: computes, hands over, receives and checks KV."""
