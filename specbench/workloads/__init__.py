"""When requests come."""
