"""The command line's types, JSON, tables, sizes and messages."""
