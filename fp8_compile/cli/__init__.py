"""The command line, ``fp8-compile``. A verb is a file in ``verbs/``: put one there and it is a verb."""
