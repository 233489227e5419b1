"""Operator contracts: semantics, validation and dispatch of every op, on every device."""
