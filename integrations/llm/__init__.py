"""One decoder model over unlike ranks: sharded weights, two reductions per layer, one deciding head rank."""
