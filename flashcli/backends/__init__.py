"""Where attention is computed."""
