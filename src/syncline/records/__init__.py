"""Data that several packages read, most of it as files: profiles, networks, plans, bench results and run records."""
