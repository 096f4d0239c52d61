from tiny_questions import prepare_questions, train  # noqa: F401
