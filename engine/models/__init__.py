"""Models: what a forward needs (``base.py``), the dense decoder, checkpoints, and the registry of architectures."""
