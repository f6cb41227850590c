"""Server-side tools: Python functions of installed packages, and remote tool services.

Nothing is imported here: every call of a tool starts a process that imports this package.
"""
