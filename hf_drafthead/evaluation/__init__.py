"""Acceptance, speed and exactness of draft heads, measured against their own base."""
