"""`ampdctl`: one file per noun; printers and views apart from commands.

stdout carries data only; progress, messages, errors and `hint:` lines go to stderr.
"""
