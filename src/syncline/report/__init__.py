"""What people look at afterwards: the page, the trace, and the record that both are made from."""
