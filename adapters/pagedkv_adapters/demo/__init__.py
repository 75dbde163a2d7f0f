"""The demonstration: a real model generates in a small pool, and another process resumes it."""
