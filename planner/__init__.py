"""Will a prompt fit, on how many cards, how long will it take: formulas over a model's config.json, with their sources."""
