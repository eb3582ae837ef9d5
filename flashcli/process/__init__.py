"""Signals, exits and threads of this process."""
