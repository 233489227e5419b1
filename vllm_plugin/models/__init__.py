"""Models whose upstream version is bound to one vendor.

Empty in this release: DeepSeek V4 will be the first.
"""
