"""One process per device: loading, LoRA activation and the request-batch runner."""
