"""`tune` and `follow`: measure, plan, try the plan, and keep the faster of plan and plain DDP."""
