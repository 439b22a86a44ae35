"""How a forward is computed otherwise than by the network as it is: packed, quantised, compiled, captured, batched."""
