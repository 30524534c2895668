"""omni-engine: a serving engine for diffusion models."""
