"""Which ranks are alive and which are late: heartbeats, watchdog, suspects, stragglers and failure reports."""
