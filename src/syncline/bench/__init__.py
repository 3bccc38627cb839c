"""Methods side by side in one run: what `syncline bench` and `syncline demo` are made of."""
