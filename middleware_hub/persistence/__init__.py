"""Between what a process remembers and the store that outlives it: look-ups before a decision, appends before an answer."""
