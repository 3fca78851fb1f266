"""Generated from proto/kvtier/v1 by scripts/python-stubs."""
