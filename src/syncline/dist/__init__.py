"""Process groups, lanes, collectives with counted bytes, and agreement between ranks."""
