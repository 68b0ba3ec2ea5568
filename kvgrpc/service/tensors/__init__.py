"""Named tensors: the table of `kvgrpc.core.tensors` with the node's transfers, behind TensorService and the session."""
