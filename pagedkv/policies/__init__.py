"""The eviction policies, one a module; their contract is ``pagedkv.policy.EvictionPolicy``."""
