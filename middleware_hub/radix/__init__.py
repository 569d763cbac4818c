"""The radix tree over texts: what it holds, what is written into it, and what is read out of it."""
