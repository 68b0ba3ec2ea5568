"""Engine: a simulated engine and its worker: it computes, hands over, receives and checks KV."""
