"""Adapters that plug PagedKV into inference frameworks: one module for each framework.

Nothing is imported here, so that each framework stays optional.
"""
