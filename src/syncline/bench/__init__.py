"""Compare methods in one run, for `syncline bench` and `syncline demo`."""
