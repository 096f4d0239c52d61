"""Which of the papers' bottlenecks an architecture has on given data, what to change, and what the change costs."""
