"""What a call says that is refused, by this package or by argparse."""

from collections.abc import Callable

from fairseq_lowrank.messages import UserError


def words_of_refusal(capsys, call: Callable, *args) -> str:
    """Return the message of a UserError, or the last line of argparse."""
    try:
        call(*args)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    except SystemExit as exit:
        assert exit.code == 2
        return capsys.readouterr().err.splitlines()[-1]
    raise AssertionError("nothing was refused")
