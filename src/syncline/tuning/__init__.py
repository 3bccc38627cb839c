"""`tune` and `follow`: measure, plan, try the plan, and keep the faster of plan and plain DDP.

The package is not called `tune`, because importing a package of that name would replace the function `syncline.tune`.
"""
