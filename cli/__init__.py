"""The omni-engine command."""
