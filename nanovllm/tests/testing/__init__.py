"""Everything that tests of the package share: checkpoints, tokenizers, engines, servers, processes and references.

README.md lists the files, and says how to add a test. Only tests import this package, and it defines no tests.
"""
