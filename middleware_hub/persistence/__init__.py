"""Between the memory of a process and the store: look-ups before a decision, appends before an answer."""
