"""Data types and pure decision functions, without input or output."""
