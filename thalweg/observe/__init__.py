"""What a training run says about itself: records, writers, tables, counts of work.

A new writer takes two steps:

1. a class with ``step(record)``, ``metric(name, value, step)`` and ``close()``
   (:class:`Writer`), and ``text(name, text, step)`` if it shows texts; any import of a
   service goes inside its ``__init__``;
2. its line in ``recorder._WRITERS``, under the key of its section of the config.
"""
