"""The verbs of the command line, one file per verb.

A verb's module has ``HELP`` (one line), a docstring (the long help), ``add_arguments(parser)`` and ``run(options)``,
which returns the exit code. Mistakes of the user are ValueError, TypeError or OSError: ``command.py`` prints them in
one line.
Anything heavy is imported in ``run``.
"""
