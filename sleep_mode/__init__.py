"""Device memory pools with tags and sleep levels. Filled by the sleep-mode work; empty in this release."""
