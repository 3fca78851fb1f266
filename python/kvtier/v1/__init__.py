"""Generated from proto/kvtier/v1/kv_tier.proto by scripts/python-stubs."""
