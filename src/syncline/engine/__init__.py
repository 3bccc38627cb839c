"""What runs an exchange: process groups, lanes, the DDP hook; and what chooses one."""
