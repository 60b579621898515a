"""The fleet side of bucketplan: capture, transport, agreement and rewriting of fx graphs."""
