"""Will a prompt fit, on how many cards, and how long will it take: formulas over a model's config.json, each with its source."""
