"""Calls of the operations, as hashable data: shapes, strides and types of arrays, options, and their checks."""
