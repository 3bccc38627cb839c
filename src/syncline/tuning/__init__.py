"""`tune` and `follow`: measure, plan, try, and keep the faster.

The package is not called `tune`, because `syncline.tune` is the function: importing a package of that name would put
the package in its place.
"""
