"""What can be typed: the options and the help of each command.

Nothing here imports torch, numpy or scipy, so that help and mistakes are answered at once. Each command imports the
module that does its work, `syncline.cli.NAME`, when it runs.
"""
