"""Data that several packages read, most of it from files: profiles, networks, plans, bench results and run records."""
