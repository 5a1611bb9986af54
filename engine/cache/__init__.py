"""Memory that outlives a step: KV blocks now, prefix and state caches later."""
