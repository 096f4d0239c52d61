"""Lines of results, statistics over seeds and sentences, and the comparison of rows. Nothing here imports torch."""
