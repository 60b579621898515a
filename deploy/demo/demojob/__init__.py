"""A small, complete FSDP training job: the model, its joint fx graph, the sharding pass and the training loop."""
