"""Device memory pools with tags, sleep levels, wake order.

Empty in this release: the sleep-mode backend will fill it.
"""
