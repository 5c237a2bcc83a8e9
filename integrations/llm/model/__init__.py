"""The decoder and how it is cut: layers, shards, one token's forward pass, sampling. It knows nothing of files or
terminals."""
