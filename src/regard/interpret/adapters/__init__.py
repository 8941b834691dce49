"""Let ``watch`` record the attention layers of each library.

The function ``attach`` of an adapter finds the layers of its library in ``watcher.names``, and
passes each of their calls to ``watcher.record`` until the stack closes. It returns whether it found
any. It ignores calls of threads that did not enter ``watch``.
"""
