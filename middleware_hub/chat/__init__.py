"""What dialects and sessions share: messages and their keys, answers, refusals, and what a dialect provides."""
